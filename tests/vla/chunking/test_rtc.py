"""Real-time chunking: the golden weights, the modes against explicit Jacobians, and what they do to the seam between two chunks."""

import pytest
import torch
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vla.chunking.rtc import RealTimeChunking, guidance, prefix_weights
from mmsdk.vla.heads.flow import Velocity, euler, noise_of, unguided


def test_the_weights_are_golden() -> None:
    linear = [1, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0, 0, 0, 0, 0, 0]
    exponential = [1, 1, 1, 0.7123, 0.4876, 0.3158, 0.1888, 0.0993, 0.0413, 0.0097, 0, 0, 0, 0, 0, 0]
    torch.testing.assert_close(prefix_weights(3, 10, 16, "linear"), torch.tensor(linear), atol=1e-4, rtol=0)
    torch.testing.assert_close(prefix_weights(3, 10, 16, "exp"), torch.tensor(exponential), atol=1e-4, rtol=0)
    second = torch.tensor([1, 1, 0.8, 0.6, 0.4, 0.2, 0, 0, 0, 0])
    torch.testing.assert_close(prefix_weights(2, 6, 10, "linear"), second, atol=1e-6, rtol=0)
    assert prefix_weights(2, 4, 6, "ones").tolist() == [1, 1, 1, 1, 0, 0] and prefix_weights(2, 4, 6, "zeros").tolist() == [
        1,
        1,
        0,
        0,
        0,
        0,
    ]
    assert prefix_weights(9, 4, 6, "linear").tolist() == [1, 1, 1, 1, 0, 0]


def test_the_guidance_is_golden() -> None:
    found = guidance(torch.arange(10, dtype=torch.float64) / 10, 5.0)
    golden = [5, 5, 4.25, 2.7619, 2.1667, 2, 2.1667, 2.7619, 4.25, 5]
    torch.testing.assert_close(found, torch.tensor(golden, dtype=torch.float64), atol=1e-4, rtol=0)
    assert float(guidance(torch.ones(1), 5.0)) == 5


CHUNK, DIMS = 6, 2


def toy() -> Velocity:
    weight = noise_of(1, (CHUNK * DIMS, CHUNK * DIMS)) * 0.3

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(x.flatten(1) @ weight * (1 + t.to(x.dtype))).view_as(x)

    return velocity


@pytest.mark.parametrize("mode", ["vjp", "identity"])
@pytest.mark.parametrize("tau", [0.0, 0.3, 0.8])
def test_guided_velocities_follow_the_formula_in_its_own_time(mode: str, tau: float) -> None:
    velocity, x, pending = toy(), noise_of(2, (1, CHUNK, DIMS)), noise_of(3, (4, DIMS))
    rtc = RealTimeChunking("vjp" if mode == "vjp" else "identity", beta=5.0, schedule="linear")
    found = -rtc.guide(pending, 2, (CHUNK, DIMS))(velocity)(x, torch.full((1, 1), 1 - tau))

    def heading(flat: Tensor) -> Tensor:
        # in the paper's time the velocity is the negative of ours
        return flat - (1 - tau) * velocity(flat.view(1, CHUNK, DIMS), torch.full((1, 1), 1 - tau)).flatten()

    jacobian = torch.autograd.functional.jacobian(heading, x.flatten()) if mode == "vjp" else torch.eye(CHUNK * DIMS)
    target = torch.cat((pending, torch.zeros(2, DIMS))).flatten()
    weights = torch.tensor([1, 1, 2 / 3, 1 / 3, 0, 0]).repeat_interleave(DIMS)
    correction = jacobian.T @ ((target - heading(x.flatten())) * weights)
    g = 5.0 if tau == 0 else min((1 - tau) / tau * ((1 - tau) ** 2 + tau**2) / (1 - tau) ** 2, 5.0)
    expected = -velocity(x, torch.full((1, 1), 1 - tau)).flatten() + g * correction
    torch.testing.assert_close(found.flatten(), expected, atol=1e-5, rtol=1e-5)


def test_the_two_jacobians_are_not_the_same_thing() -> None:
    x, pending, t = noise_of(2, (1, CHUNK, DIMS)), noise_of(3, (4, DIMS)), torch.full((1, 1), 0.9)
    modes = [RealTimeChunking(mode).guide(pending, 2, (CHUNK, DIMS))(toy())(x, t) for mode in ("vjp", "identity")]
    assert float((modes[0] - modes[1]).abs().max()) > 0.05


def test_a_hard_prefix_holds_the_committed_actions_at_clean_time() -> None:
    pending, seen = noise_of(3, (4, DIMS)), list[tuple[Tensor, Tensor]]()

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        seen.append((x, t))
        return toy()(x, t[:, -1:])

    actions = euler(RealTimeChunking("hard-prefix").guide(pending, 3, (CHUNK, DIMS))(velocity), noise_of(2, (1, CHUNK, DIMS)), 5)
    torch.testing.assert_close(actions[0, :3], pending[:3], atol=1e-6, rtol=1e-6)
    for step, (x, t) in enumerate(seen):
        torch.testing.assert_close(x[0, :3], pending[:3])
        torch.testing.assert_close(t[0], torch.tensor([0.0] * 3 + [1 - step / 5] * 3, dtype=torch.float64))


def test_numbers_that_the_robot_does_not_have_are_left_alone() -> None:
    velocity, x, t = toy(), noise_of(2, (1, CHUNK, DIMS)), torch.full((1, 1), 0.5)
    guided = RealTimeChunking("identity").guide(noise_of(3, (4, 1)), 2, (CHUNK, DIMS))(velocity)(x, t)
    plain = velocity(x, t)
    torch.testing.assert_close(guided[..., 1], plain[..., 1])
    # and so is what the old chunk says nothing about
    torch.testing.assert_close(guided[:, 4:], plain[:, 4:])
    assert not torch.allclose(guided[:, :4, 0], plain[:, :4, 0])


def test_nothing_pending_is_no_guidance() -> None:
    assert RealTimeChunking().guide(torch.zeros(0, DIMS), 0, (CHUNK, DIMS)) is unguided


def test_wrong_input_is_named() -> None:
    for beta in (0.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match=f"beta {beta}"):
            RealTimeChunking(beta=beta)
    # past the types, which only tests check as they run
    for name, value, told in (
        ("mode", "hard_prefix", "there is vjp, identity, hard-prefix"),
        ("schedule", "cosine", "there is exp, linear"),
    ):
        rtc = RealTimeChunking()
        object.__setattr__(rtc, name, value)
        with pytest.raises(InputError, match=f"{name} '{value}' is not known; {told}"):
            rtc.__post_init__()
    for pending, delay in ((torch.zeros(2, 3), 1), (torch.zeros(2, 2), -1), (torch.full((2, 2), float("nan")), 1)):
        with pytest.raises(InputError, match="pending"):
            RealTimeChunking().guide(pending, delay, (CHUNK, DIMS))
    guided = RealTimeChunking("vjp").guide(torch.zeros(2, 2), 1, (CHUNK, DIMS))(toy())
    with torch.inference_mode(), pytest.raises(InputError, match="inference mode"):
        guided(noise_of(2, (1, CHUNK, DIMS)), torch.ones(1, 1))


def smooth_motions(horizon: int, mean: float, spread: float) -> Velocity:
    """The exact flow to motions that are normal about `mean`, near actions alike (correlation falls over four steps)."""
    steps = torch.arange(horizon, dtype=torch.float64)
    covariance = spread**2 * torch.exp(-0.5 * ((steps[:, None] - steps) / 4).square()) + 1e-6 * torch.eye(horizon, dtype=torch.float64)

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        noise = float(t.flatten()[0])
        total = (1 - noise) ** 2 * covariance + noise**2 * torch.eye(horizon, dtype=torch.float64)
        off = torch.linalg.solve(total, x.double() - (1 - noise) * mean)
        data = mean + (1 - noise) * covariance @ off
        return (noise * off - data).to(x.dtype)

    return velocity


@pytest.mark.parametrize("mode", ["vjp", "identity"])
@pytest.mark.parametrize("seed", range(4))
def test_vr_09_the_seam_stays_under_the_velocity_limit(mode: str, seed: int) -> None:
    """The old chunk and the new one are 0.5 apart where one takes over from the other; the limit is 0.2 a step."""
    horizon, delay, velocity, noise = 16, 3, smooth_motions(16, 0.5, 0.2), noise_of(seed, (1, 16, 1))
    free = euler(velocity, noise, 20)[0, :, 0]
    old = torch.full((12, 1), float(free[delay]) - 0.5)
    rtc = RealTimeChunking("vjp" if mode == "vjp" else "identity")
    joined = euler(rtc.guide(old, delay, (horizon, 1))(velocity), noise, 20)[0, :, 0]
    # executed: the old chunk for the delay, then the new one
    naive, executed = (torch.cat((old[:delay, 0], new[delay:])) for new in (free, joined))

    def jerk(motion: Tensor) -> float:
        return float(motion.diff(n=3).abs().max())

    assert float(naive.diff().abs().max()) > 0.49
    assert float(executed.diff().abs().max()) < 0.2
    assert jerk(executed) < jerk(naive) / 2
