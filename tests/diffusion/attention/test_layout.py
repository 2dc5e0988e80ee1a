"""Orders and blocks of tokens, counted out token by token."""

import itertools

import pytest
import torch

from mmsdk.diffusion.attention.blocks import arranged, kept_mass, kept_most, pooled, restored, touching
from mmsdk.diffusion.attention.kmeans import kmeans
from mmsdk.diffusion.attention.layout import clusters, raster, tiles, window
from mmsdk.diffusion.attention.types import Blocks, Grid
from mmsdk.errors import InputError

CPU = torch.device("cpu")
GRIDS = [Grid(3, 5, 7), Grid(4, 4, 4), Grid(1, 1, 1), Grid(5, 9, 6, before=3), Grid(2, 8, 8, after=70), Grid(5, 3, 10, 65, 2)]


def places(grid: Grid) -> list[tuple[int, int, int]]:
    return list(itertools.product(range(grid.frames), range(grid.height), range(grid.width)))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("shape", "size"), [((4, 4, 4), 64), ((1, 8, 16), 128), ((2, 3, 5), 16)])
def test_tiles_hold_their_tokens_side_by_side(grid: Grid, shape: tuple[int, int, int], size: int) -> None:
    tiling = tiles(grid, shape, size, CPU)
    order, bounds = tiling.blocks.order, tiling.blocks.bounds(CPU)[0, 0].tolist()
    assert order is not None and sorted(order[0, 0].tolist()) == list(range(grid.tokens))
    assert bounds[0] == 0 and bounds[-1] == grid.tokens and len(bounds) == len(tiling.tile) + 1
    counts = [-(-side // step) for side, step in zip((grid.frames, grid.height, grid.width), shape, strict=True)]
    assert list(tiling.shape) == counts
    for number, (low, high) in enumerate(itertools.pairwise(bounds)):
        tokens = order[0, 0, low:high].tolist()
        assert 0 < len(tokens) <= size and tokens == sorted(tokens)
        if tiling.tile[number] < 0:
            assert all(token < grid.before or token >= grid.before + grid.video for token in tokens)
            continue
        for token in tokens:
            place = places(grid)[token - grid.before]
            i, j, k = (at // step for at, step in zip(place, shape, strict=True))
            assert (i * counts[1] + j) * counts[2] + k == tiling.tile[number]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_raster_keeps_tokens_where_they_are_and_text_apart(grid: Grid) -> None:
    tiling = raster(grid, 16, CPU)
    assert tiling.blocks.order is None and tiling.blocks.count == len(tiling.tile)
    bounds = tiling.blocks.bounds(CPU)[0, 0]
    text = grid.text(CPU)
    for low, high, tile in zip(bounds[:-1].tolist(), bounds[1:].tolist(), tiling.tile.tolist(), strict=True):
        assert text[low:high].all() if tile < 0 else not text[low:high].any()
    assert tiling.video(bounds[None, None, :-1])[0, 0, 0] == grid.before


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_clusters_hold_the_tokens_of_their_label_and_go_back_exactly(grid: Grid) -> None:
    labels = torch.randint(0, 9, (2, 3, grid.video), generator=torch.Generator().manual_seed(0))
    labels[labels == 4] = 5
    blocks, label = clusters(labels, 9, grid, 16)
    bounds = blocks.bounds(CPU)
    assert blocks.order is not None and (bounds.diff(dim=-1) >= 0).all() and (bounds[..., -1] == grid.tokens).all()
    for b, h in itertools.product(range(2), range(3)):
        for number, (low, high) in enumerate(itertools.pairwise(bounds[b, h].tolist())):
            tokens = blocks.order[b, h, low:high].tolist()
            name = int(label[b, h, number])
            assert len(tokens) <= 16 and (name != 9 or not tokens)
            assert all((name == labels[b, h, t - grid.before]) if not grid.text(CPU)[t] else name == -1 for t in tokens)
    x = torch.randn(2, 3, grid.tokens, 4)
    assert torch.equal(restored(arranged(x, blocks), blocks), x)


def test_means_divide_by_the_tokens_that_are_there() -> None:
    grid = Grid(3, 5, 7, before=2)
    blocks = tiles(grid, (4, 4, 4), 64, CPU).blocks
    x = torch.randn(2, 3, grid.tokens, 4)
    assert blocks.order is not None
    means = pooled(arranged(x, blocks), blocks)
    for number, (low, high) in enumerate(itertools.pairwise(blocks.bounds(CPU)[0, 0].tolist())):
        torch.testing.assert_close(means[:, :, number], x[:, :, blocks.order[0, 0, low:high]].mean(2))
    empty = Blocks(16, 20, torch.tensor([[[0, 16, 16, 20]]]))
    assert not pooled(torch.ones(1, 1, 20, 2), empty)[0, 0, 1].any()


def test_flags_touch_the_blocks_of_their_tokens() -> None:
    flags = torch.zeros(40, dtype=torch.bool)
    flags[[3, 39]] = True
    assert touching(flags, Blocks(16, 40))[0, 0].tolist() == [True, False, True]
    turned = Blocks(16, 40, None, torch.arange(39, -1, -1)[None, None])
    assert touching(flags, turned)[0, 0].tolist() == [True, False, True]
    flags[3] = False
    assert touching(flags, turned)[0, 0].tolist() == [True, False, False]


def test_the_smallest_set_with_enough_mass() -> None:
    shares = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert kept_mass(shares, 0.65).tolist() == [False, True, False, True]
    assert kept_mass(shares, 0.75).tolist() == [False, True, True, True]
    assert kept_mass(shares, 1.0).all() and kept_mass(shares, 0.0).tolist() == [False, True, False, False]
    assert kept_mass(shares, 0.0, least=3).tolist() == [False, True, True, True]
    assert kept_most(torch.tensor([1.0, 2.0, 2.0]), 1).tolist() == [False, True, False]


def test_windows_at_an_edge_are_cut_off_or_moved_inside() -> None:
    """Five tiles along one side, three in a window."""
    cut, moved = (window((1, 1, 5), (1, 1, 3), inside, CPU).int().tolist() for inside in (False, True))
    assert cut[0] == [1, 1, 0, 0, 0] and cut[2] == [0, 1, 1, 1, 0] and moved[0] == [1, 1, 1, 0, 0] and moved[4] == [0, 0, 1, 1, 1]
    near = window((3, 2, 4), (3, 1, 3), False, CPU)
    for (i, one), (j, other) in itertools.product(enumerate(itertools.product(range(3), range(2), range(4))), repeat=2):
        apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
        assert near[i, j] == (apart[0] <= 1 and apart[1] == 0 and apart[2] <= 1)


def test_lloyd_finds_groups_that_lie_apart_and_warm_starts_where_it_was() -> None:
    generator = torch.Generator().manual_seed(0)
    middle = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    true = torch.arange(90) % 3
    x = (middle[true] + torch.randn(90, 2, generator=generator))[None, None]
    labels, centroids = kmeans(x, x[:, :, :3], 10)
    assert torch.equal(labels[0, 0], true)
    for group in range(3):
        torch.testing.assert_close(centroids[0, 0, group], x[0, 0, true == group].mean(0))
    again, same = kmeans(x, centroids, 1)
    assert torch.equal(again, labels)
    torch.testing.assert_close(same, centroids)
    lonely, kept = kmeans(x, torch.cat((centroids, torch.full((1, 1, 1, 2), 1e3)), 2), 2)
    assert lonely.max() == 2 and (kept[0, 0, 3] == 1e3).all()


def test_a_grid_without_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="no video"):
        Grid(0, 4, 4)
