"""ACT against a slow version written from the paper, head by head; and the VAE's half."""

import math

import pytest
import torch
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kv.none import NoCache
from mmsdk.stages import Context
from mmsdk.vla.heads.act import ACT, ACTConfig, ACTHead, act_loss
from mmsdk.vla.heads.flow import noise_of
from mmsdk.vla.types import ActionHead, Observation, Stamp

TINY = ACTConfig(features=6, state_dim=5, action_dim=3, chunk=4, width=16, heads=2, inner=20, encoder_layers=2, latent=3)


def made() -> ACT:
    torch.manual_seed(0)
    return ACT(TINY).eval()


def attention(state: dict[str, Tensor], name: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights, biases = state[f"{name}.in_proj_weight"].chunk(3), state[f"{name}.in_proj_bias"].chunk(3)
    q, k, v = (x @ w.T + b for x, w, b in zip((query, key, value), weights, biases, strict=True))
    heads = []
    for part in (slice(0, 8), slice(8, 16)):
        rows = []
        for i in range(len(q)):
            scores = torch.tensor([float(q[i, part] @ k[j, part]) / math.sqrt(8) for j in range(len(k))])
            rows.append(scores.softmax(0) @ v[:, part])
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=1) @ state[f"{name}.out_proj.weight"].T + state[f"{name}.out_proj.bias"]


def norm(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    spread = x.var(-1, unbiased=False, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / (spread + 1e-5).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]


def linear(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def forward_by_hand(s: dict[str, Tensor], features: Tensor, cells: list[tuple[int, int]], p: Tensor, z: Tensor) -> Tensor:
    grid = []
    tall, wide = max(y for y, _ in cells) + 1, max(x for _, x in cells) + 1
    for y, x in cells:
        row = []
        for count, size in ((y + 1, tall), (x + 1, wide)):
            angle = count / (size + 1e-6) * 2 * math.pi
            row += [(math.sin, math.cos)[i % 2](angle / 10_000 ** (2 * (i // 2) / 8)) for i in range(8)]
        grid.append(row)
    place = torch.cat((s["token_place"], torch.tensor(grid)))
    x = torch.cat((linear(s, "latent_in", z)[None], linear(s, "state_in", p)[None], linear(s, "feature_in", features)))
    for i in range(2):
        n = f"encoder.{i}"
        x = norm(s, f"{n}.norm1", x + attention(s, f"{n}.attention", x + place, x + place, x))
        x = norm(s, f"{n}.norm2", x + linear(s, f"{n}.down", linear(s, f"{n}.up", x).clamp_min(0)))
    y, at, n = torch.zeros(4, 16), s["query_place"], "decoder.0"
    y = norm(s, f"{n}.norm1", y + attention(s, f"{n}.itself", y + at, y + at, y))
    y = norm(s, f"{n}.norm2", y + attention(s, f"{n}.across", y + at, x + place, x))
    y = norm(s, f"{n}.norm3", y + linear(s, f"{n}.down", linear(s, f"{n}.up", y).clamp_min(0)))
    return linear(s, "action_out", norm(s, "norm", y))


def test_actions_equal_a_slow_version_from_the_paper() -> None:
    network, cells = made(), [(0, 0), (0, 1), (1, 0), (1, 1)]
    features, state, latent = noise_of(1, (2, 4, 6)), noise_of(2, (2, 5)), noise_of(3, (2, 3))
    with torch.no_grad():
        found = network(features, torch.tensor(cells), state, latent)
        weights = dict(network.state_dict())
        for row in range(2):
            expected = forward_by_hand(weights, features[row], cells, state[row], latent[row])
            torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-5)


def test_the_latent_of_a_demonstration_does_not_see_its_padding() -> None:
    network, state, actions = made(), noise_of(2, (2, 5)), noise_of(3, (2, 4, 3))
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    with torch.no_grad():
        mean, spread = network.encode(state, actions, valid)
        other = actions.clone()
        other[1, 2:] = 99
        again, _ = network.encode(state, other, valid)
    assert mean.shape == spread.shape == (2, 3)
    torch.testing.assert_close(again, mean)


def test_the_loss_is_absolute_error_and_the_closed_divergence() -> None:
    predicted, actions, valid = noise_of(1, (2, 4, 3)), noise_of(2, (2, 4, 3)), torch.tensor([[True] * 4, [True] + [False] * 3])
    mean, spread = noise_of(3, (2, 3)), noise_of(4, (2, 3))
    error = torch.cat(((predicted - actions)[0], (predicted - actions)[1, :1])).abs().mean()
    latent = torch.distributions.Normal(mean, (spread / 2).exp())
    divergence = torch.distributions.kl_divergence(latent, torch.distributions.Normal(torch.zeros(2, 3), torch.ones(2, 3))).sum(-1).mean()
    torch.testing.assert_close(act_loss(predicted, actions, valid, mean, spread), error + 10 * divergence)


def test_vr_06_the_head_answers_in_the_robots_dimensions() -> None:
    network = ACT(TINY)
    head = ACTHead(network, dims=2)
    stamp = Stamp(0.5)
    chunk = head(Context(torch.ones(1, 6), NoCache()), Observation({}, torch.tensor([0.1, 0.2]), "", stamp))
    with torch.no_grad():
        state = torch.tensor([[0.1, 0.2, 0, 0, 0]])
        expected = network(torch.ones(1, 1, 6), torch.zeros(1, 2, dtype=torch.long), state, torch.zeros(1, 3))[0, :, :2]
    torch.testing.assert_close(chunk.actions, expected)
    assert isinstance(head, ActionHead) and chunk.stamp == stamp
    with pytest.raises(InputError, match="at most 5"):
        head(Context(torch.ones(1, 6), NoCache()), Observation({}, torch.zeros(6), "", stamp))
    with pytest.raises(InputError, match="dims"):
        ACTHead(network, dims=4)
