"""FastVID against its rules, written out frame by frame in double precision."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmsdk.errors import InputError, PluginError
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.methods.fastvid import FastVID
from mmsdk.vision.types import VisualTokens

Tokens = Callable[..., VisualTokens]


def scenes(grid: tuple[int, int, int], cuts: list[int], seed: int) -> Tensor:
    """Frames that resemble each other between cuts."""
    generator = torch.Generator().manual_seed(seed)
    scene = torch.zeros(grid[0], dtype=torch.int64)
    scene[cuts] = 1
    looks = torch.randn(len(cuts) + 1, grid[1] * grid[2], 12, generator=generator)
    frames = looks[scene.cumsum(0)]
    return (frames + 0.1 * torch.randn(frames.shape, generator=generator)).flatten(0, 1)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def segments(x: Tensor, frame: list[int], frames: int, threshold: float, least: int) -> list[list[int]]:
    means = [x[[i for i, f in enumerate(frame) if f == t]].mean(dim=0) for t in range(frames)]
    alike = [cosine(a, b) for a, b in itertools.pairwise(means)]
    lowest = sorted(range(frames - 1), key=lambda t: alike[t])[: least - 1]
    ends = [t for t in range(frames - 1) if alike[t] < threshold or t in lowest] + [frames - 1]
    return [list(range(a + 1, b + 1)) for a, b in itertools.pairwise([-1, *ends])]


def peaks(x: Tensor, members: list[int], neighbours: int) -> dict[int, float]:
    gap = {(i, j): float((x[i] - x[j]).norm()) / x.shape[1] ** 0.5 for i in members for j in members}
    density = {}
    for i in members:
        near = sorted(gap[i, j] for j in members)[:neighbours]
        density[i] = float(torch.tensor([-sum(g * g for g in near) / len(near)], dtype=torch.float64).exp())
    widest = max(gap.values())
    return {i: density[i] * min([gap[i, j] for j in members if density[j] > density[i]], default=widest) for i in members}


def spread(total: int, frames: int) -> list[int]:
    return [total * (t + 1) // frames - total * t // frames for t in range(frames)]


def expected(source: VisualTokens, m: int, least: int) -> tuple[dict[int, Tensor], list[list[int]]]:
    """What each surviving token becomes, by its source token, and the segments."""
    x, frame, frames = source.features.double(), source.positions[:, 0].tolist(), source.grid[0]
    count = max(1, int(m * 0.4))
    salient: list[int] = []
    for t, quota in enumerate(spread(m - count, frames)):
        inside = sorted((i for i, f in enumerate(frame) if f == t), key=lambda i: -float(source.saliency[i]))
        salient += inside[:quota]
    free = [i for i in range(len(frame)) if i not in salient]
    score: dict[int, float] = {}
    for t in range(frames):
        score |= peaks(x, [i for i in free if frame[i] == t], 4)
    parts = segments(x, frame, frames, 0.9, least)
    anchors: list[int] = []
    for part in parts:
        for t in part[::-1][::4]:
            begin = max(part[0], t - 3)
            quota = count * (t + 1) // frames - count * begin // frames
            anchors += sorted((i for i in free if frame[i] == t), key=lambda i: -score[i])[:quota]
    assert len(anchors) == count, "the test's budget leaves every anchor frame tokens enough"
    segment = {t: number for number, part in enumerate(parts) for t in part}
    groups: dict[int, list[int]] = {a: [a] for a in anchors}
    for i in free:
        near = [a for a in anchors if segment[frame[a]] == segment[frame[i]]] or anchors
        if i not in anchors:
            groups[max(near, key=lambda a: cosine(x[i], x[a]))].append(i)
    became = {i: x[i] for i in salient}
    for a, members in groups.items():
        weight = source.weight[members].double()
        became[a] = 0.6 * x[a] + 0.4 * (x[members] * weight[:, None]).sum(dim=0) / weight.sum()
    return became, parts


@pytest.mark.parametrize("m", [2, 9, 20, 33])
@pytest.mark.parametrize("least", [1, 3, 8])
def test_a_clip_equals_the_rules(tokens_of: Tokens, m: int, least: int) -> None:
    grid = (11, 3, 4)
    source = tokens_of(grid, seed=m, features=scenes(grid, [5, 8], seed=m))
    became, parts = expected(source, m, least)
    assert len(parts) == max(3, least)
    (result,) = FastVID(segments=least)([source], [Budget(m)])
    assert torch.equal(result.tokens.positions, source.positions[sorted(became)])
    torch.testing.assert_close(result.tokens.features.double(), torch.stack([became[i] for i in sorted(became)]), rtol=1e-4, atol=1e-4)
    assert float(result.tokens.weight.sum()) == float(source.weight.sum())


def test_a_clip_thinned_before_equals_the_rules(tokens_of: Tokens) -> None:
    grid = (6, 4, 4)
    left = torch.randperm(96, generator=torch.Generator().manual_seed(1))[:70].sort().values
    source = tokens_of(grid, seed=4, features=scenes(grid, [3], seed=4), kept=left)
    became, _ = expected(source, 12, 2)
    (result,) = FastVID(segments=2)([source], [Budget(12)])
    assert torch.equal(result.tokens.positions, source.positions[sorted(became)])
    torch.testing.assert_close(result.tokens.features.double(), torch.stack([became[i] for i in sorted(became)]), rtol=1e-4, atol=1e-4)


def test_a_picture_is_a_clip_of_one_frame(tokens_of: Tokens) -> None:
    source = tokens_of((1, 6, 6), seed=5)
    became, _ = expected(source, 10, 8)
    (result,) = FastVID()([source], [Budget(10)])
    assert torch.equal(result.tokens.positions, source.positions[sorted(became)])


@pytest.mark.parametrize("m", [60, 95])
def test_where_anchor_frames_run_out_others_help(tokens_of: Tokens, m: int) -> None:
    (result,) = FastVID(segments=1, threshold=-1.0)([tokens_of((8, 3, 4), seed=m)], [Budget(m)])
    assert len(result.tokens) == m and int((result.audit.assignment < 0).sum()) == 0


def test_a_stride_beyond_the_clip_is_that_of_the_clip(tokens_of: Tokens) -> None:
    source = tokens_of((5, 3, 4), seed=6)
    whole, beyond = (FastVID(stride=stride)([source], [Budget(13)])[0] for stride in (5, 10**30))
    assert torch.equal(whole.audit.assignment, beyond.audit.assignment) and torch.equal(whole.tokens.features, beyond.tokens.features)


def test_no_randomness(tokens_of: Tokens) -> None:
    source = tokens_of((4, 3, 3), features=torch.ones(36, 12))
    runs = [FastVID()([source], [Budget(10)])[0].audit.assignment for _ in range(3)]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_refusals(tokens_of: Tokens) -> None:
    with pytest.raises(InputError, match=r"item 1 \(index 0, saliency\): fastvid needs the encoder's attention"):
        FastVID()([dataclasses.replace(tokens_of((2, 2, 2)), saliency=torch.empty(0))], [Budget(3)])
    with pytest.raises(PluginError, match="stride"):
        FastVID(stride=0)
