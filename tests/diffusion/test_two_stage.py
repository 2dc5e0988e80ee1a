"""Two stages at their limits: all of the high one, none of it, and what lies between."""

import pytest
import torch
from torch import Tensor

from mmsdk.diffusion.dit import DiT, DiTConfig
from mmsdk.diffusion.generate import generate
from mmsdk.diffusion.guidance import ClassifierFree
from mmsdk.diffusion.rotary import ByAxis
from mmsdk.diffusion.schedule import flow
from mmsdk.diffusion.two_stage import Stages, generate_in_two_stages, snapped
from mmsdk.diffusion.types import Condition
from mmsdk.diffusion.upscale import LatentUpscaler, bilinear
from mmsdk.errors import InputError

SHAPE = (1, 2, 3, 8, 12)
TEXT = Condition(torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(1)))
LOW, HIGH = flow(4, 2.0), flow(5, 3.0)


@pytest.fixture(scope="module")
def model() -> DiT:
    torch.manual_seed(0)
    return DiT(DiTConfig(2, 2, heads=2, head_dim=12, hidden=16, layers=1, text_width=6, rotary=ByAxis(), frequencies=16)).eval()


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def noise(shape: tuple[int, ...], skipped: tuple[int, ...] = (0,)) -> Tensor:
    generator = seeded()
    torch.randn(skipped, generator=generator)
    return torch.randn(shape, generator=generator)


def test_all_high_steps_are_a_plain_run_with_the_same_noise(model: DiT) -> None:
    made = generate_in_two_stages(model, SHAPE, TEXT, Stages(LOW, HIGH, last=5), seeded())
    plain = generate(model, noise(SHAPE), TEXT, HIGH)
    assert torch.equal(made.latents, plain.latents) and made.cost == plain.cost


@pytest.mark.parametrize("to_the_end", [True, False])
def test_no_high_step_is_the_low_run_resized(model: DiT, to_the_end: bool) -> None:
    """One generator feeds both stages: the low noise comes behind the high one."""
    made = generate_in_two_stages(model, SHAPE, TEXT, Stages(LOW, HIGH, last=0, to_the_end=to_the_end), seeded())
    low = generate(model, noise((1, 2, 3, 4, 6), SHAPE), TEXT, LOW)
    torch.testing.assert_close(made.latents, bilinear(low.latents, (8, 12)))
    assert made.cost == low.cost


def test_between_both_noise_is_put_back_and_the_last_steps_are_taken(model: DiT) -> None:
    """The low stage ends where it is as clean as the high one begins; written out by hand."""
    stages, sigma = Stages(LOW, HIGH, last=3), HIGH.sigmas[2]
    made = generate_in_two_stages(model, SHAPE, TEXT, stages, seeded())
    again = generate_in_two_stages(model, SHAPE, TEXT, stages, seeded())
    assert torch.equal(made.latents, again.latents)
    latents, taken = noise((1, 2, 3, 4, 6), SHAPE), 0
    with torch.no_grad():
        while LOW.sigmas[taken] > sigma:
            velocity = model(latents, torch.tensor([LOW.time(taken)]), TEXT)
            clip, latents = latents - LOW.sigmas[taken] * velocity, LOW.step(latents, velocity, taken)
            taken += 1
        latents = (1 - sigma) * bilinear(clip, (8, 12)) + sigma * noise(SHAPE)
        for step in range(2, 5):
            latents = HIGH.step(latents, model(latents, torch.tensor([HIGH.time(step)]), TEXT), step)
    torch.testing.assert_close(made.latents, latents)
    assert 0 < taken < 4 and made.cost.passes == taken + 3
    assert made.cost.tokens == taken * 18 + 3 * 72


def test_switches_compose_and_sides_must_divide(model: DiT) -> None:
    guided = ClassifierFree(Condition(torch.zeros(1, 4, 6)), 3.0)
    made = generate_in_two_stages(
        model, SHAPE, TEXT, Stages(LOW, HIGH, 4, to_the_end=True), seeded(), bilinear, guided, "nabla:mass=1.0", "taylorseer:2,warm=1"
    )
    assert made.latents.isfinite().all() and made.cost.passes == 16
    assert made.cost.skipped == {"cond": 2, "uncond": 2}
    with pytest.raises(InputError, match="multiple of 2"):
        generate_in_two_stages(model, (1, 2, 3, 9, 12), TEXT, Stages(LOW, HIGH, 1), seeded())


def test_an_untrained_upscaler_is_bilinear_and_learns() -> None:
    torch.manual_seed(0)
    upscaler, latents = LatentUpscaler(2, width=4, blocks=2), torch.randn(1, 2, 3, 4, 5)
    assert torch.equal(upscaler(latents, (8, 10)), bilinear(latents, (8, 10)))
    target = torch.randn(1, 2, 3, 8, 10)
    optimiser = torch.optim.SGD(upscaler.parameters(), 0.1)
    losses = []
    for _ in range(3):
        loss = (upscaler(latents, (8, 10)) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[1] < losses[0]


def test_sizes_snap_to_those_of_minimax_h3() -> None:
    assert snapped(120, 768, 1344) == (124, 768, 1344) and snapped(1, 3, 50) == (5, 32, 64)
