"""Methods whose pattern hangs on the grid alone: STA and radial attention, pair of tokens by pair of tokens."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmsdk.diffusion.attention.methods.radial import Radial, widths
from mmsdk.diffusion.attention.methods.sta import Sta
from mmsdk.diffusion.attention.types import Choice, Grid, Place, Selection, Selector

Seen = Callable[[Selection], Tensor]


def chosen(method: Selector, grid: Grid) -> Selection:
    x = torch.zeros(1, 1, grid.tokens, 8)
    choice: Choice = method(x, x, x, Place(grid, step=20, steps=50, layer=4, layers=30))
    assert isinstance(choice, Selection)
    return choice


def slow_sta(grid: Grid, tile: tuple[int, int, int], reach: tuple[int, int, int]) -> Tensor:
    """Each query by itself: the tiles whose distance to the middle of its window is small enough on all sides."""
    sides = (grid.frames, grid.height, grid.width)
    counts = [-(-side // step) for side, step in zip(sides, tile, strict=True)]
    tokens = list(itertools.product(*(range(side) for side in sides)))

    def near(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        for a, b, step, count, wide in zip(one, other, tile, counts, reach, strict=True):
            middle = min(max(a // step, wide // 2), max(count - 1 - wide // 2, 0))
            if abs(b // step - middle) > wide // 2:
                return False
        return True

    return torch.tensor([[near(one, other) for other in tokens] for one in tokens])


@pytest.mark.parametrize("grid", [Grid(6, 9, 8), Grid(3, 5, 7), Grid(8, 4, 4)], ids=str)
def test_sta_reads_the_tiles_of_its_window(grid: Grid, seen: Seen) -> None:
    method = Sta(tile_frames=2, tile_height=3, tile_width=2, window_frames=3, window_height=1, window_width=3, block=16)
    assert torch.equal(seen(chosen(method, grid))[0, 0], slow_sta(grid, (2, 3, 2), (3, 1, 3)))


def test_sta_reads_equally_many_tokens_everywhere_where_tiles_are_whole(seen: Seen) -> None:
    """The published window of 18 x 24 x 24 tokens, on a grid of 5 x 4 x 4 tiles of 6 x 8 x 8, thinned to one token in each direction."""
    method = Sta(tile_frames=1, tile_height=1, tile_width=1, block=16)
    counts = seen(chosen(method, Grid(5, 4, 4))).sum(-1)
    assert (counts == 27).all()


def test_radial_widths_by_hand() -> None:
    """Frames of 256 tokens, 4 of them: 2^9 halved by bit lengths 0, 1, 2, 2; then 64, below the least, so every second distance."""
    assert widths(256, 4, 1.0) == ([512, 256, 128, 128], [True] * 4)
    wide, read = widths(256, 9, 1.0)
    assert wide[4:] == [128] * 5 and read[4:] == [True, False, True, False, True]
    assert widths(256, 4, 0.25) == ([128] * 4, [True, False, False, False])


def slow_radial(grid: Grid, decay_factor: float, sink: bool) -> Tensor:
    """Entry by entry, pair of frames by pair of frames, each block of 128 by 128 a part of both."""
    count, p = -(-grid.video // 128), grid.frame
    kept = torch.eye(count, dtype=torch.bool)
    for i, j in itertools.product(range(grid.frames), repeat=2):
        width = 2 ** p.bit_length() / 2 ** abs(i - j).bit_length() * decay_factor
        if sink and j == 0:
            entries = torch.ones(p, p, dtype=torch.bool)
        elif width < 128 and abs(i - j) % int(128 / width):
            continue
        else:
            apart = (torch.arange(p)[:, None] - torch.arange(p)).abs()
            entries = apart <= max(width, 128)
        rows, columns = torch.arange(i * p, i * p + p) // 128, torch.arange(j * p, j * p + p) // 128
        for row, column in itertools.product(rows.unique().tolist(), columns.unique().tolist()):
            part = entries[rows == row][:, columns == column]
            dense = part.sum(0) / min(128, grid.video - row * 128)
            kept[row, column] |= bool((dense > 1 / 3).sum() / ((dense > 0).sum() + 1e-9) > 0.6)
    return kept


@pytest.mark.parametrize(
    ("grid", "decay_factor", "sink"),
    [
        (Grid(4, 16, 16), 1.0, True),
        (Grid(4, 16, 16), 0.5, False),
        (Grid(9, 10, 17), 0.7, True),
        (Grid(3, 25, 31), 0.3, False),
        (Grid(12, 5, 6), 1.0, False),
    ],
    ids=str,
)
def test_radial_keeps_the_blocks_that_the_rule_gives(grid: Grid, decay_factor: float, sink: bool) -> None:
    assert torch.equal(chosen(Radial(decay_factor, sink), grid).mask[0, 0], slow_radial(grid, decay_factor, sink))


def test_radial_reads_less_the_further_frames_are_apart() -> None:
    mask = chosen(Radial(sink=False), Grid(8, 32, 32)).mask[0, 0]
    shares = [mask[:8, 8 * j : 8 * j + 8].double().mean().item() for j in range(8)]
    assert shares[0] == 1.0 and all(a >= b for a, b in itertools.pairwise(shares)) and shares[-1] < 0.6
