"""Flow matching: the published golden values, the distribution of times, and the same walk under both conventions of time."""

import math

import pytest
import torch
from torch import Tensor

from mmsdk.vla.heads.flow import euler, flow_loss, interpolate, noise_of, reversed_time, sample_times, time_embedding


@pytest.mark.parametrize(("t", "sines", "cosines"), [(1.0, (0, 0, 0, 1), (1, 1, -1, 0)), (0.9, (0, 0, 1, 0.98769), (1, -1, 0, 0.15643))])
def test_the_time_embedding_has_the_golden_values(t: float, sines: tuple[float, ...], cosines: tuple[float, ...]) -> None:
    found = time_embedding(torch.tensor([t], dtype=torch.float64), 8)[0]
    torch.testing.assert_close(found, torch.tensor(sines + cosines, dtype=torch.float64), atol=1e-5, rtol=0)


def test_times_follow_beta_and_never_reach_zero() -> None:
    times = sample_times(20_000, torch.Generator().manual_seed(0))
    assert times.shape == (20_000, 1) and float(times.min()) >= 0.001 and float(times.max()) <= 1
    # the distribution function of Beta(1.5, 1) is x^1.5
    for x in (0.1, 0.3, 0.5, 0.8):
        share = float(((times - 0.001) / 0.999 <= x).float().mean())
        assert share == pytest.approx(x**1.5, abs=4 * math.sqrt(x**1.5 * (1 - x**1.5) / 20_000))


def test_noise_is_interpolated_to_data_and_the_loss_is_zero_for_the_true_velocity() -> None:
    actions, noise = noise_of(1, (2, 5, 3)), noise_of(2, (2, 5, 3))
    torch.testing.assert_close(interpolate(actions, noise, torch.ones(2, 1)), noise)
    torch.testing.assert_close(interpolate(actions, noise, torch.zeros(2, 1)), actions)
    mixed = interpolate(actions, noise, torch.tensor([[0.0], [1.0]]))
    torch.testing.assert_close(mixed, torch.stack((actions[0], noise[1])))
    times = sample_times(2, torch.Generator().manual_seed(0))
    assert float(flow_loss(lambda x, t: noise - actions, actions, noise, times)) == 0
    wrong = flow_loss(lambda x, t: torch.zeros_like(x), actions, noise, times, torch.tensor([[True] * 2 + [False] * 3, [False] * 5]))
    assert float(wrong) == pytest.approx(float((noise - actions)[0, :2].square().mean()), rel=1e-5)


def test_euler_visits_the_published_times_and_is_exact_on_a_straight_flow() -> None:
    actions, noise, seen = noise_of(1, (1, 4, 2)), noise_of(2, (1, 4, 2)), list[float]()

    def straight(x: Tensor, t: Tensor) -> Tensor:
        seen.append(float(t))
        return (x - actions) / t[..., None].float()

    torch.testing.assert_close(euler(straight, noise, 10), actions, atol=1e-6, rtol=0)
    t, dt, published = 1.0, -1 / 10, list[float]()
    while t >= -dt / 2:
        published.append(t)
        t += dt
    assert seen == pytest.approx(published)


def test_both_conventions_of_time_give_the_same_trajectory() -> None:
    weight = noise_of(3, (3, 3))

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(x @ weight) * (1 + t[..., None].float())

    noise, backwards = noise_of(2, (2, 4, 3)), reversed_time(velocity)
    x = noise
    for step in range(8):
        x = x + backwards(x, torch.full((2, 1), step / 8)) / 8
    torch.testing.assert_close(x, euler(velocity, noise, 8), atol=1e-5, rtol=1e-5)


def test_noise_depends_on_the_seed_alone() -> None:
    first = noise_of(7, (2, 3))
    torch.rand(5)
    torch.testing.assert_close(first, noise_of(7, (2, 3)), rtol=0, atol=0)
    assert not torch.equal(first, noise_of(8, (2, 3)))
