"""Diffusion Policy: the schedule and DDIM against loops written from the papers, and the slice that is executed."""

import math

import pytest
import torch
from torch import Tensor

from mmsdk.errors import InputError, ModelError
from mmsdk.kv.none import NoCache
from mmsdk.stages import Context
from mmsdk.vla.heads.diffusion import DDIM, DiffusionHead, diffusion_loss, window
from mmsdk.vla.heads.flow import noise_of
from mmsdk.vla.heads.unet import UNet, UNetConfig
from mmsdk.vla.types import ActionHead, Observation, Stamp


def schedule(trained: int) -> list[float]:
    def level(s: float) -> float:
        return math.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2

    abar, product = [], 1.0
    for i in range(trained):
        product *= 1 - min(1 - level((i + 1) / trained) / level(i / trained), 0.999)
        abar.append(product)
    return abar


def test_the_schedule_is_the_squared_cosine() -> None:
    torch.testing.assert_close(DDIM().abar, torch.tensor(schedule(100), dtype=torch.float64), atol=1e-12, rtol=1e-9)
    assert float(DDIM().abar[0]) > 0.999 and float(DDIM().abar[-1]) < 1e-5


@pytest.mark.parametrize(("trained", "steps"), [(100, 100), (100, 10), (50, 7)])
def test_ddim_is_the_published_walk(trained: int, steps: int) -> None:
    weight, abar = noise_of(1, (3, 3)), schedule(trained)

    def predict(x: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(x @ weight + 0.01 * t[:, None, None])

    x = noise = noise_of(2, (2, 4, 3))
    stride = trained // steps
    times = [i * stride for i in range(steps)][::-1]
    for place, t in enumerate(times):
        eps = predict(x, torch.full((2,), t))
        clean = ((x - math.sqrt(1 - abar[t]) * eps) / math.sqrt(abar[t])).clamp(-1, 1)
        before = abar[times[place + 1]] if place + 1 < steps else 1.0
        x = math.sqrt(before) * clean + math.sqrt(1 - before) * eps
    torch.testing.assert_close(DDIM(trained, steps)(predict, noise), x, atol=1e-5, rtol=1e-5)


def test_the_true_noise_leads_to_the_data() -> None:
    data, sampler = noise_of(3, (1, 4, 2)).clamp(-1, 1), DDIM(100, 5)

    def true(x: Tensor, t: Tensor) -> Tensor:
        share = sampler.abar[t].float()[:, None, None]
        return (x - share.sqrt() * data) / (1 - share).sqrt()

    torch.testing.assert_close(sampler(true, noise_of(4, (1, 4, 2))), data, atol=1e-5, rtol=1e-5)


TINY = UNetConfig(action_dim=3, condition=2 * 9, levels=(8, 16, 24), kernel=3, groups=4, time=8)


def head() -> DiffusionHead:
    torch.manual_seed(0)
    return DiffusionHead(UNet(TINY).eval(), DDIM(20, 4), horizon=8, executed=4, n_obs=2, state_dim=5, dims=2)


def known() -> Context:
    return Context(torch.arange(4).float()[None], NoCache())


def observation(value: float, seed: int = 0) -> Observation:
    return Observation({}, torch.tensor([value, 2 * value]), "", Stamp(0.25, seed=seed))


def test_vr_13_the_first_observation_is_repeated() -> None:
    policy = head()
    first = policy.condition(known(), observation(0.5))
    assert first.tolist() == [0.5, 1, 0, 0, 0, 0, 1, 2, 3]
    assert isinstance(policy, ActionHead)
    alone, twice = policy(known(), observation(0.5)), policy.act([first, first], observation(0.5))
    torch.testing.assert_close(alone.actions, twice.actions)
    second = policy.condition(known(), observation(1.0))
    torch.testing.assert_close(window([first, first, second], 2), torch.stack((first, second)))
    torch.testing.assert_close(window([second], 3), torch.stack((second,) * 3))
    assert not torch.allclose(policy.act([first, second], observation(1.0)).actions, twice.actions)
    with pytest.raises(InputError, match="no observation"):
        window([], 2)


def test_what_is_executed_starts_at_the_newest_observation() -> None:
    policy = head()
    seen = window([policy.condition(known(), observation(0.5))], 2).flatten()[None]
    with torch.no_grad():
        whole = policy.sampler(lambda x, t: policy.network(x, t, seen), noise_of(0, (1, 8, 3)))
    chunk = policy(known(), observation(0.5))
    torch.testing.assert_close(chunk.actions, whole[0, 1:5, :2])
    assert chunk.actions.shape == (4, 2) and chunk.stamp == observation(0.5).stamp
    assert not torch.allclose(policy(known(), observation(0.5, seed=1)).actions, chunk.actions)


def test_the_network_halves_and_doubles_the_chunk_and_hears_time_and_condition() -> None:
    network, x, condition = head().network, noise_of(1, (2, 8, 3)), noise_of(2, (2, 18))
    with torch.no_grad():
        base = network(x, torch.tensor([3, 3]), condition)
        assert base.shape == x.shape
        assert not torch.allclose(network(x, torch.tensor([4, 3]), condition)[0], base[0])
        torch.testing.assert_close(network(x, torch.tensor([4, 3]), condition)[1], base[1])
        assert not torch.allclose(network(x, torch.tensor([3, 3]), condition + 1), base)
    with pytest.raises(ModelError, match="groups divide"):
        UNetConfig(levels=(7,))


def test_the_loss_is_the_error_of_the_noise_and_reaches_every_parameter() -> None:
    network, sampler, actions, condition = head().network, DDIM(20, 4), noise_of(1, (3, 8, 3)), noise_of(2, (3, 18))
    loss = diffusion_loss(network, sampler, actions, condition, torch.Generator().manual_seed(5))
    generator, abar = torch.Generator().manual_seed(5), schedule(20)
    times, noise = torch.randint(20, (3,), generator=generator), torch.randn(3, 8, 3, generator=generator)
    noisy = torch.stack([math.sqrt(abar[t]) * actions[row] + math.sqrt(1 - abar[t]) * noise[row] for row, t in enumerate(times.tolist())])
    torch.testing.assert_close(loss, (network(noisy, times, condition) - noise).square().mean())
    loss.backward()
    assert all(float(parameter.grad.abs().sum()) > 0 for parameter in network.parameters())
