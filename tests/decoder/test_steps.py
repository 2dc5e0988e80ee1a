"""A decode step through tensors that stay where they are, which is what a CUDA graph records, against the step that makes its own.

Without a GPU nothing is recorded: the same function runs each time, over the same tensors. The other side of the last test runs this file
under TRITON_INTERPRET=1, where it goes through the kernels that a graph would hold.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.moe import Mixture
from mmsdk.decoder.rope import Sections
from mmsdk.decoder.sight import Local
from mmsdk.decoder.steps import Steps, bucket, next_scores
from mmsdk.decoder.transformer import Decoder
from mmsdk.generate.config import GenerationConfig
from mmsdk.kernels.case import Launch
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.fixed import FixedCache
from mmsdk.kv.memory import PagedMemory
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import Pages
from mmsdk.kv.rounded import RoundedPages
from mmsdk.kv.types import KVCache
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.serve.engine import Engine
from mmsdk.stages import Recall
from mmsdk.vision.types import Image

CONFIG = DecoderConfig(vocabulary=48, width=24, layers=3, heads=6, kv_heads=2, head_dim=8, inner=32, context=256)


def decoder(config: DecoderConfig = CONFIG) -> Decoder:
    generator = torch.Generator().manual_seed(0)
    state = Decoder(config).state_dict()
    return Decoder.of(config, {n: torch.randn(x.shape, generator=generator) * 0.3 + ("norm" in n) for n, x in state.items()})


def pool(config: DecoderConfig = CONFIG, page: int = 16) -> Pages:
    return Pages(config.layers, config.kv_heads, config.head_dim, 80, torch.float32, "cpu", page)


def told(rows: int, count: int, seed: int = 1) -> Tensor:
    return torch.randint(0, CONFIG.vocabulary, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model: Decoder, cache: KVCache, lengths: tuple[int, ...]) -> None:
    """Prompts of these lengths, padded in front; a row of no tokens is one of padding."""
    most = max(lengths)
    positions = (torch.arange(most) - (most - torch.tensor(lengths))[:, None]).clamp_min(-1)
    model(model.embed(told(len(lengths), most)), positions, cache)


def paged(model: Decoder, lengths: tuple[int, ...], pages: Pages | None = None) -> PagedCache:
    cache = PagedCache.empty(pages or pool(model.config), len(lengths))
    read(model, cache, lengths)
    return cache


@pytest.mark.parametrize("lengths", [(5,), (16, 31), (3, 40, 15, 16), (1, 2, 3, 4, 5, 6, 7, 47)])
def test_a_step_through_tensors_that_stay_is_the_step_to_the_bit(lengths: tuple[int, ...]) -> None:
    """Over the ends of blocks, and what the cache then holds."""
    model = decoder()
    steps, ours, theirs = Steps(model), paged(model, lengths), paged(model, lengths)
    for ids in told(len(lengths), 20, seed=2).T:
        with torch.no_grad():
            (found,) = steps(ids, ours, True)
        assert torch.equal(found, next_scores(model, ids, theirs))
        assert torch.equal(ours.position, theirs.position)
    for layer in range(CONFIG.layers):
        mine, other = ours.view(layer), theirs.view(layer)
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values) and torch.equal(mine.valid, other.valid)


@torch.no_grad()
def test_rows_that_are_nobodys_change_nothing() -> None:
    """Three rows run as four: to the bit what four rows are of which one is padding, and near what three are alone."""
    model = decoder()
    steps, ours, four, three = Steps(model), paged(model, (9, 30, 16)), paged(model, (9, 30, 16, 0)), paged(model, (9, 30, 16))
    for ids in told(3, 20, seed=2).T:
        (found,) = steps(ids, ours, True)
        padded = torch.cat((four.position[:3], torch.tensor([-1])))[:, None]
        hidden = model(model.embed(torch.cat((ids, torch.tensor([0])))[:, None]), padded, four)
        assert torch.equal(found, model.logits(hidden[:, -1])[:3])
        alone = next_scores(model, ids, three)
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
        assert torch.equal(found.argmax(-1), alone.argmax(-1))


@torch.no_grad()
def test_rows_that_leave_and_prompts_that_share_a_pool_find_their_own_blocks() -> None:
    model, pages = decoder(), pool()
    steps, theirs = Steps(model), paged(model, (9, 30, 16, 20))
    ours = paged(model, (9, 30, 16, 20), pages)
    other, alone = paged(model, (33,), pages), paged(model, (33,))
    for round_, ids in enumerate(told(4, 12, seed=2).T):
        if round_ == 5:
            kept = torch.tensor([3, 1])
            ours, theirs = ours.select(kept), theirs.select(kept)
        now = ids[: len(ours.position)]
        assert torch.equal(steps(now, ours, True)[0], next_scores(model, now, theirs))
        assert torch.equal(steps(ids[:1], other, True)[0], next_scores(model, ids[:1], alone))


@torch.no_grad()
def test_heads_that_turn_along_several_axes_stand_where_the_cache_says() -> None:
    model = decoder(replace(CONFIG, rope_sections=Sections((2, 1, 1), interleaved=True)))
    steps, ours, theirs = Steps(model), paged(model, (5, 9)), paged(model, (5, 9))
    for cache in (ours, theirs):
        cache.turn(cache.position - torch.tensor([2, 4]))
    for ids in told(2, 5, seed=2).T:
        assert torch.equal(steps(ids, ours, True)[0], next_scores(model, ids, theirs))
    moved, still = paged(model, (5, 9)), ours
    assert not torch.equal(steps(ids, moved, True)[0], steps(ids, still, True)[0])


@pytest.mark.parametrize(("rows", "blocks", "found"), [(1, 1, (1, 64)), (3, 64, (4, 64)), (33, 65, (64, 128)), (65, 3, (0, 64))])
def test_steps_are_recorded_for_powers_of_two(rows: int, blocks: int, found: tuple[int, int]) -> None:
    assert bucket(rows, blocks) == found


@torch.no_grad()
@pytest.mark.parametrize("other", ["dense", "rounded", "rows", "window", "experts", "hook", "grad"])
def test_what_a_graph_cannot_hold_goes_the_other_way_and_nothing_has_happened(other: str) -> None:
    changes = {
        "window": {"local": Local((1,), window=7)},
        "experts": {"feed": Mixture(experts=4, chosen=2, inner=8, shared=8, scoring="softmax")},
    }
    config = replace(CONFIG, **changes.get(other, {}))
    model, lengths = decoder(config), (2,) * 65 if other == "rows" else (5, 9)
    cache: KVCache
    if other == "dense":
        cache = DenseCache.allocate(config.layers, 2, config.kv_heads, config.head_dim, 20, torch.float32, "cpu")
    elif other == "rounded":
        cache = PagedCache.empty(RoundedPages(pool(config, 32), "int8", 20), 2)
    else:
        cache = PagedCache.empty(pool(config), len(lengths))
    read(model, cache, lengths)
    heard = list[str]()
    if other == "hook":
        model.layers[1].register_forward_hook(lambda *_: heard.append("layer"))
    model.stepping = Steps(model)
    before, ids = cache.position.clone(), told(len(lengths), 1)[:, 0]
    with torch.set_grad_enabled(other == "grad"):
        assert model.stepping(ids, cache, True) == ()
    assert torch.equal(cache.position, before)
    assert next_scores(model, ids, cache).isfinite().all() and torch.equal(cache.position, before + 1)
    assert (heard == ["layer"]) == (other == "hook")


@torch.no_grad()
def test_other_weights_are_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[FixedCache]()
    monkeypatch.setattr("mmsdk.decoder.steps.FixedCache", lambda *sizes: (made.append(FixedCache(*sizes)), made[-1])[1])
    model = decoder()
    steps, cache, ids = Steps(model), paged(model, (5, 9)), told(2, 1)[:, 0]
    for _ in range(2):
        steps(ids, cache, True)
    assert len(made) == 1
    model.layers[0].mlp.down.weight = nn.Parameter(torch.zeros_like(model.layers[0].mlp.down.weight))
    (found,) = steps(ids, cache, True)
    assert len(made) == 2
    theirs = paged(model, (5, 9))
    # keys of the first two tokens are older weights' in the one, so that the last step alone is no comparison
    assert found.shape == next_scores(model, ids, theirs).shape and found.isfinite().all()


def test_a_pool_that_is_gone_is_not_held() -> None:
    model = decoder()
    steps = Steps(model)
    with torch.no_grad():
        steps(told(1, 1)[:, 0], paged(model, (5,)), True)
    assert not len(steps._made)


def test_a_fixed_cache_is_a_cache() -> None:
    assert isinstance(FixedCache(pool(), 1, 4), KVCache)


def test_pipeline_and_engine_say_the_same_through_it(small: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    def pictures() -> list[Image]:
        generator = torch.Generator().manual_seed(3)
        return [Image(torch.randint(0, 256, (3, 56, 56), dtype=torch.uint8, generator=generator), f"picture {n}") for n in range(3)]

    def answers() -> list[str]:
        pipe = Pipeline(small, recall=Recall(PagedMemory()))
        found = [str(answer) for answer in pipe([(one, "What is it?") for one in pictures()], max_tokens=12)]
        with Engine(Pipeline(small), rows=4, tokens=2048) as engine:
            for place, one in enumerate(pictures()):
                engine.submit([one], "What is it?" * (1 + place), GenerationConfig(max_tokens=6 + 5 * place))
            return found + [outcome.text for _, outcome in sorted(engine.drain().items())]

    theirs, taken = answers(), Counter[tuple[int, bool]]()
    steps = Steps(small.decoder)

    def counted(ids: Tensor, cache: KVCache, scored: bool) -> tuple[Tensor, ...]:
        found = steps(ids, cache, scored)
        taken[len(ids), scored] += len(found)
        return found

    monkeypatch.setattr(small.decoder, "stepping", counted)
    assert answers() == theirs
    # rows of three and, as they end, of fewer: the pipeline's by their scores, the engine's up to the last norm
    assert {rows for rows, scored in +taken if scored} >= {3} and {rows for rows, scored in +taken if not scored} >= {1, 3}


@torch.no_grad()
def scores(fixed: bool) -> Tensor:
    """Of ten steps of three rows, in float32."""
    model = decoder()
    cache, ids = paged(model, (9, 30, 16)), told(3, 10, seed=2)
    if fixed:
        model.stepping = Steps(model)
    return torch.stack([next_scores(model, now, cache) for now in ids.T])


def tell() -> None:
    """The scores, and how often each kernel was launched."""
    launched, inner = Counter[str](), Launch.__call__

    def counted(launch: Launch) -> None:
        launched[launch.kernel.fn.__module__.rsplit(".")[-1]] += 1
        inner(launch)

    Launch.__call__ = counted  # type: ignore[method-assign]
    sys.stdout.write(json.dumps([scores(fixed=True).tolist(), dict(launched)]) + "\n")


def test_what_a_graph_records_is_kernels_and_their_scores_are_torchs() -> None:
    done = subprocess.run(
        [sys.executable, __file__], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found, launched = json.loads(done.stdout.splitlines()[-1])
    torch.testing.assert_close(torch.tensor(found), scores(fixed=False), rtol=1e-4, atol=1e-4)
    # two norms a layer and one behind all, of the prompt and of ten steps; queries and keys; keys and values
    assert launched["rms_norm"] == 7 * 11 and launched["swiglu"] == 3 * 11 and launched["rope"] == 2 * 3 * 11
    assert launched["kv_store"] == 2 * 3 * 11 and launched["paged_decode"] == 3 * 10


if __name__ == "__main__":
    tell()
