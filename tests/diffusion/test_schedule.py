"""Sigmas and steps are those of diffusers' FlowMatchEulerDiscreteScheduler."""

import warnings

import pytest
import torch

from mmsdk.diffusion.schedule import Schedule, flow, flow_by_length, grown_shift
from mmsdk.errors import InputError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    diffusers = pytest.importorskip("diffusers")


@pytest.mark.parametrize(("steps", "shift"), [(1, 1.0), (7, 1.0), (4, 3.0), (50, 12.0)])
def test_shifted_schedules_and_their_steps_are_those_of_diffusers(steps: int, shift: float) -> None:
    theirs, ours = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift), flow(steps, shift)
    theirs.set_timesteps(steps)
    torch.testing.assert_close(torch.tensor(ours.sigmas), theirs.sigmas, rtol=0, atol=1e-6)
    draw = torch.Generator().manual_seed(0)
    expected = latents = torch.randn(2, 3, generator=draw)
    for step, time in enumerate(theirs.timesteps):
        velocity = torch.randn(2, 3, generator=draw)
        assert ours.time(step) == pytest.approx(float(time), abs=1e-3)
        expected = theirs.step(velocity, time, expected, return_dict=False)[0]
        latents = ours.step(latents, velocity, step)
    torch.testing.assert_close(latents, expected)


@pytest.mark.parametrize("terminal", [None, 0.1])
def test_schedules_by_length_are_those_of_ltx(terminal: float | None) -> None:
    theirs = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=terminal)
    mu = 0.95 + (2.05 - 0.95) / 3072 * (2000 - 1024)
    theirs.set_timesteps(sigmas=[1 - step / 9 * (1 - 1 / 10) for step in range(10)], mu=mu)
    torch.testing.assert_close(torch.tensor(flow_by_length(10, 2000, terminal).sigmas), theirs.sigmas, rtol=0, atol=1e-6)


def test_the_clean_clip_is_found_from_any_step_and_last_steps_are_a_schedule() -> None:
    schedule, clip, noise = flow(5, 3.0), torch.full((2, 2), 2.0), torch.ones(2, 2)
    for step, sigma in enumerate(schedule.sigmas[:-1]):
        torch.testing.assert_close(schedule.clean((1 - sigma) * clip + sigma * noise, noise - clip, step), clip)
    assert schedule.last(2).sigmas == schedule.sigmas[3:] and schedule.last(0).sigmas == (0.0,)
    assert grown_shift(3.0, 4096, 1024) == 6.0


def test_what_is_no_schedule_is_refused() -> None:
    for wrong in (lambda: flow(0), lambda: flow(3, 0.0), lambda: Schedule((0.5, 0.7, 0.0)), lambda: flow(3).last(4)):
        with pytest.raises(InputError):
            wrong()
