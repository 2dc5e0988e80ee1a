"""SVG and SVG2: which mask a head takes, and which clusters are read, written out slowly from their rules."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmsdk.diffusion.attention.methods.svg import Svg
from mmsdk.diffusion.attention.methods.svg2 import Svg2
from mmsdk.diffusion.attention.types import Grid, Place, Selection

Seen = Callable[[Selection], Tensor]


def place(grid: Grid) -> Place:
    return Place(grid, step=20, steps=50, layer=4, layers=30)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slow_masks(grid: Grid, width: int) -> tuple[Tensor, Tensor]:
    """The spatial and the temporal mask, token by token, each band widened to whole blocks of 128."""
    n, p = grid.video, grid.frame
    token = torch.arange(n)
    frame_major = token
    place_major = token % p * grid.frames + token // p

    def band(at: Tensor) -> Tensor:
        block = at // 128
        return (block[:, None] - block).abs() <= width // 128

    first = token // 128 * 128 < p
    masks = [band(frame_major) | first, band(place_major)]
    text = grid.text(torch.device("cpu"))
    wide = torch.ones(2, grid.tokens, grid.tokens, dtype=torch.bool)
    video = (~text).nonzero()
    for out, mask in zip(wide, masks, strict=True):
        out[video, video.T] = mask
    return wide[0], wide[1]


@pytest.mark.parametrize("grid", [Grid(6, 10, 13), Grid(5, 16, 8, before=4, after=9)], ids=str)
def test_svg_takes_the_mask_that_loses_less_of_the_sampled_rows(grid: Grid, seen: Seen) -> None:
    """Some heads attend within a frame, some within a place of the picture, some anywhere."""
    h, d = 6, 16
    query, keys, values = (normal(1, h, grid.tokens, d, seed=n) for n in range(3))
    video = slice(grid.before, grid.before + grid.video)
    token = torch.arange(grid.video)
    frame, spot = normal(grid.frames, d, seed=4)[token // grid.frame], normal(grid.frame, d, seed=5)[token % grid.frame]
    for head, marks in ((0, frame), (1, spot), (2, frame), (3, spot)):
        query[0, head, video], keys[0, head, video] = 3 * marks, 3 * marks
    method = Svg(share=0.2)
    choice = method(query, keys, values, place(grid))
    assert isinstance(choice, Selection)
    masks = slow_masks(grid, method.width(grid))
    rows = torch.randperm(grid.video, generator=torch.Generator().manual_seed(0))[:32] + grid.before
    taken = []
    for head in range(h):
        scores = (query[0, head, rows].double() @ keys[0, head].double().T) / 4
        dense = scores.softmax(-1) @ values[0, head].double()
        losses = [
            float(((scores.masked_fill(~m[rows], -torch.inf).softmax(-1) @ values[0, head].double() - dense) ** 2).mean()) for m in masks
        ]
        taken.append(int(losses[1] < losses[0]))
        assert torch.equal(seen(choice)[0, head], masks[taken[-1]])
    assert taken[:4] == [0, 1, 0, 1]


def test_svg_reads_about_the_share_that_it_names() -> None:
    """Wan's 21 frames of 30 x 52: the band and the sink."""
    grid = Grid(21, 30, 52)
    width = Svg().width(grid)
    assert width % 128 == 0 and width - 128 < grid.tokens * (1 - math.sqrt(0.7)) <= width
    at = torch.arange(-(-grid.tokens // 128))
    share = ((at[:, None] - at).abs() <= width // 128).double().mean().item()
    assert share == pytest.approx(0.3, abs=0.02)


def test_svg2_reads_the_fewest_clusters_with_the_mass(seen: Seen) -> None:
    grid = Grid(3, 10, 9, before=3)
    query, keys, values = (normal(1, 2, grid.tokens, 16, seed=n) for n in range(3))
    method = Svg2(query_centroids=7, key_centroids=12, mass=0.6, least=0.2, first_iterations=5, block=16)
    choice = method(query, keys, values, place(grid))
    assert isinstance(choice, Selection)
    query_centres, key_centres = choice.memory
    for head in range(2):
        q, k = query[0, head, 3:].double(), keys[0, head, 3:].double()
        label_q, label_k = (torch.cdist(x, c[0, head].double()).argmin(1) for x, c in ((q, query_centres), (k, key_centres)))
        counts = label_k.bincount(minlength=12)
        scores = query_centres[0, head].double() @ key_centres[0, head].double().T / 4
        shares = counts * scores.exp()
        shares = shares / shares.sum(-1, keepdim=True)
        read = seen(choice)[0, head, 3:, 3:]
        for row in label_q.unique().tolist():
            kept, total = set[int](), 0.0
            for j in sorted(range(12), key=lambda j: -shares[row, j].item()):
                if total >= 0.6 and len(kept) >= math.ceil(0.2 * 12):
                    break
                kept.add(j)
                total += shares[row, j].item()
            expected = torch.isin(label_k, torch.tensor(sorted(kept)))
            assert (read[label_q == row] == expected).all()
            assert shares[row, sorted(kept)].sum() >= 0.6


def test_svg2_starts_a_step_where_the_last_one_ended() -> None:
    """Two iterations from centroids that have settled move nothing; without them the first step's iterations run again."""
    grid = Grid(2, 8, 8)
    spots = 20 * normal(5, 16, seed=9)
    token = torch.arange(grid.video) % 5
    query, keys, values = (spots[token].expand(1, 2, -1, -1) + normal(1, 2, grid.video, 16, seed=n) for n in range(3))
    method = Svg2(query_centroids=5, key_centroids=5, first_iterations=20)
    first = method(query, keys, values, place(grid))
    assert isinstance(first, Selection)
    second = method(query, keys, values, replace(place(grid), step=21, memory=first.memory))
    assert isinstance(second, Selection)
    assert torch.equal(first.mask, second.mask)
    for a, b in zip(first.memory, second.memory, strict=True):
        torch.testing.assert_close(a, b)


def test_svg2_with_all_the_mass_is_dense(seen: Seen) -> None:
    grid = Grid(2, 9, 7)
    query, keys, values = (normal(1, 2, grid.tokens, 16, seed=n) for n in range(3))
    choice = Svg2(20, 30, mass=1.0, least=1.0, first_iterations=3)(query, keys, values, place(grid))
    assert isinstance(choice, Selection) and seen(choice).all() and choice.density() == 1.0
