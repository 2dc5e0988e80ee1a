"""Generations with guidance, sparse attention and step caches, alone and together, against diffusers' own scheduler and caches."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmsdk.diffusion.caching import Caching, Kept, Pass, step_cache
from mmsdk.diffusion.dit import DiT
from mmsdk.diffusion.generate import generate
from mmsdk.diffusion.guidance import ClassifierFree, Distilled
from mmsdk.diffusion.magnitudes import measured
from mmsdk.diffusion.models import load
from mmsdk.diffusion.schedule import flow
from mmsdk.diffusion.types import Condition
from mmsdk.errors import InputError, PluginError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    diffusers = pytest.importorskip("diffusers")
    from diffusers.hooks.taylorseer_cache import TaylorSeerState

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
STEPS = 6
CACHED = ["first_block:0.3", "teacache:0.4", "taylorseer:3", "magcache:0.5,ratios=1 0.99 1.01"]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, DiT]:
    """Diffusers' Wan at tiny size, and ours from its files."""
    folder: Path = tmp_path_factory.mktemp("wan")
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 8, "freq_dim": 32}
    theirs = diffusers.WanTransformer3DModel(**sizes, ffn_dim=32, num_layers=3).eval()
    theirs.save_pretrained(folder)
    return theirs, load(folder)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


NOISE, TEXT, EMPTY = drawn(1, 4, 3, 8, 12), Condition(drawn(1, 5, 8)), Condition(torch.zeros(1, 5, 8))


def by_diffusers(model: Any, scale: float, shift: float = 3.0, steps: int = STEPS) -> Tensor:
    """The loop of a pipeline: two passes a step, guided, by its own scheduler."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    latents = NOISE
    with torch.no_grad():
        for time in scheduler.timesteps:
            predicted = []
            for branch, condition in (("cond", TEXT), ("uncond", EMPTY)):
                with model.cache_context(branch):
                    predicted.append(model(latents, time[None], condition.text, return_dict=False)[0])
            velocity = predicted[1] + scale * (predicted[0] - predicted[1])
            latents = scheduler.step(velocity, time, latents, return_dict=False)[0]
    return latents


def test_a_guided_generation_is_that_of_diffusers(both: tuple[Any, DiT]) -> None:
    theirs, ours = both
    told: list[int] = []
    made = generate(ours, NOISE, TEXT, flow(STEPS, 3.0), ClassifierFree(EMPTY, 4.0), advance=told.append)
    torch.testing.assert_close(made.latents, by_diffusers(theirs, 4.0), rtol=0, atol=1e-4)
    assert made.cost.passes == 2 * STEPS and made.cost.tokens == 2 * STEPS * 72 and told == list(range(1, STEPS + 1))


def test_a_scale_of_one_and_a_distilled_model_take_one_pass(both: tuple[Any, DiT]) -> None:
    plain, distilled = (generate(both[1], NOISE, TEXT, flow(3), way) for way in (ClassifierFree(EMPTY, 1.0), Distilled()))
    assert torch.equal(plain.latents, distilled.latents) and plain.cost.passes == 3
    with pytest.raises(InputError, match="1 rows for 2 clips"):
        generate(both[1], NOISE.expand(2, -1, -1, -1, -1), TEXT, flow(3))


def test_sparse_attention_that_keeps_all_is_dense_and_less_is_not(both: tuple[Any, DiT]) -> None:
    dense, whole, less = (generate(both[1], NOISE, TEXT, flow(3), attention=way).latents for way in ("dense", "nabla:mass=1.0", "ress"))
    torch.testing.assert_close(whole, dense, rtol=0, atol=1e-4)
    assert less.isfinite().all()


@pytest.mark.parametrize(
    "cache", ["first_block:0", "teacache:0", "taylorseer:1", "magcache:0,ratios=1 1 1", "teacache:0,coefficients=-1 -1"]
)
def test_a_threshold_of_nothing_skips_nothing(both: tuple[Any, DiT], cache: str) -> None:
    plain, cached = (generate(both[1], NOISE, TEXT, flow(STEPS), ClassifierFree(EMPTY), cache=way) for way in ("none", cache))
    assert torch.equal(plain.latents, cached.latents) and set(cached.cost.skipped.values()) == {0}


@pytest.mark.parametrize("cache", CACHED)
def test_steps_are_skipped_branches_stand_alone_and_runs_repeat(both: tuple[Any, DiT], cache: str) -> None:
    """A branch skips as it does when it is the only one: were state shared, the other's residuals would come in between."""
    guided = [generate(both[1], NOISE, TEXT, flow(STEPS), ClassifierFree(TEXT, 3.0), cache=cache) for _ in range(2)]
    alone = generate(both[1], NOISE, TEXT, flow(STEPS), cache=cache)
    skipped = guided[0].cost.skipped
    assert torch.equal(guided[0].latents, guided[1].latents) and 0 < skipped["cond"] <= STEPS - 2
    assert skipped["cond"] == skipped["uncond"] == alone.cost.skipped["cond"]
    torch.testing.assert_close(guided[0].latents, alone.latents)
    sparse = generate(both[1], NOISE, TEXT, flow(STEPS), cache=cache, attention="nabla:mass=1.0")
    torch.testing.assert_close(sparse.latents, alone.latents, rtol=0, atol=1e-4)
    assert sparse.cost.skipped == alone.cost.skipped


def calls(both: tuple[Any, DiT], cache: str, steps: int = STEPS) -> list[Tensor]:
    """Velocities of a cached run on given latents, as if one more step were to come: the last step is not forced."""
    caching, out = Caching(step_cache(cache)), []
    for step, time in enumerate(flow(steps, 3.0).sigmas[:-1]):
        latents = NOISE * (1 - step / 40)
        with torch.no_grad():
            out.append(both[1](latents, torch.tensor([1000 * time]), TEXT, through=caching.at(step, steps + 1, "cond")))
    return out


@pytest.mark.parametrize("cache", ["first_block", "magcache"])
def test_caches_do_what_those_of_diffusers_do(both: tuple[Any, DiT], cache: str) -> None:
    theirs = both[0]
    ratios = [1.0, 1.02, 0.99, 1.01, 0.98, 0.97]
    if cache == "first_block":
        config, text = diffusers.FirstBlockCacheConfig(threshold=0.1), "first_block:0.1"
    else:
        config = diffusers.MagCacheConfig(threshold=0.05, num_inference_steps=STEPS + 1, mag_ratios=[*ratios, 1.0])
        text = f"magcache:0.05,ratios={' '.join(map(str, [*ratios, 1.0]))}"
    theirs.enable_cache(config)
    try:
        for step, (sigma, ours) in enumerate(zip(flow(STEPS, 3.0).sigmas, calls(both, text), strict=False)):
            with torch.no_grad(), theirs.cache_context("cond"):
                expected = theirs(NOISE * (1 - step / 40), torch.tensor([1000 * sigma]), TEXT.text, return_dict=False)[0]
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    finally:
        theirs.disable_cache()


def test_taylorseer_extrapolates_as_diffusers_does() -> None:
    method, state, kept = step_cache("taylorseer:3,warm=3,order=2"), TaylorSeerState(torch.float32, max_order=2), Kept()
    for step in range(12):
        x, rise = drawn(1, 2, step + 1)[..., :1], torch.full((1, 2, 1), float(step) ** 2)
        passed = method(Pass(x, [lambda tokens, rise=rise: tokens + rise], lambda tokens: tokens, step, 99, kept, step == 0))
        state.current_step, kept = step, passed.kept
        if passed.skipped:
            torch.testing.assert_close(passed.out - x, state.predict()[0])
        else:
            assert step < 3 or (step - 4) % 3 == 0
            state.update((rise,))


def test_magnitudes_are_measured_of_every_step_and_make_a_cache(both: tuple[Any, DiT]) -> None:
    ratios = measured(both[1], NOISE, TEXT, flow(STEPS))
    assert len(ratios) == STEPS and ratios[0] == 1.0 and all(ratio > 0 for ratio in ratios)
    cached = generate(both[1], NOISE, TEXT, flow(STEPS), cache=f"magcache:0.5,ratios={' '.join(map(str, ratios))}")
    assert cached.latents.isfinite().all() and cached.cost.skipped["cond"] > 0


@pytest.mark.parametrize("wrong", ["first_blok", "none:1", "magcache", "teacache:coefficients=a b", "taylorseer:0", "magcache:ratios=x"])
def test_what_is_no_cache_is_refused(wrong: str) -> None:
    with pytest.raises(PluginError):
        step_cache(wrong)
