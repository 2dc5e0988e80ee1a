"""Attention over pages against plain softmax over the same tokens laid side by side, and against the kernel's own reference."""

import pytest
import torch
from torch import Tensor

from mmsdk.attention.dense import Dense
from mmsdk.attention.mask import Everything, Masks
from mmsdk.kernels.ops.paged_decode import paged_decode
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import Pages
from mmsdk.kv.types import PagedView

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def filled(lengths: list[int], g: int, d: int, dtype: torch.dtype, scattered: bool, seed: int = 0) -> tuple[PagedView, Tensor]:
    """A layer with rows of these lengths, the last token of each new; where scattered, every other block of the pool is someone else's."""
    generator = torch.Generator().manual_seed(seed)
    pages = Pages(1, g, d, 2 * sum(-(-length // 16) for length in lengths) + 1, dtype, "cpu")
    pages.keys.fill_(torch.nan)
    pages.values.fill_(torch.nan)
    if scattered:
        everything = pages.blocks.take(range(1), pages.blocks.columns)
        pages.blocks.give(range(1), everything[::2])
    cache = PagedCache.empty(pages, len(lengths))
    most = max(lengths)
    positions = (torch.arange(most) - (most - torch.tensor(lengths))[:, None]).clamp_min(-1)
    for part in (positions[:, :-1], positions[:, -1:]):
        cache.advance(part)
        pair = [torch.randn(len(lengths), g, part.shape[1], d, generator=generator).to(dtype) for _ in range(2)]
        view = cache.append(0, *pair)
    assert isinstance(view, PagedView)
    return view, torch.tensor(lengths)


def slow(query: Tensor, view: PagedView) -> Tensor:
    """Row by row and head by head."""
    side, out = view.gathered(), torch.zeros(query.shape, dtype=torch.float64)
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            shared = head // (query.shape[1] // side.keys.shape[1])
            keys, values = (x[row, shared][side.valid[row]].double() for x in (side.keys, side.values))
            out[row, head, 0] = (keys @ query[row, head, 0].double() * query.shape[3] ** -0.5).softmax(0) @ values
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("rows", [[70, 1, 16, 33], [70]], ids=["together", "alone"])
@pytest.mark.parametrize(("h", "g", "d"), [(1, 1, 64), (3, 3, 72), (9, 3, 64), (7, 1, 96), (16, 2, 80), (24, 1, 32)])
def test_ka_12_and_ka_13_every_group_and_head_size(h: int, g: int, d: int, rows: list[int], scattered: bool, dtype: torch.dtype) -> None:
    view, lengths = filled(rows, g, d, dtype, scattered)
    assert any(len(row) > 1 for row in view.stretches) == scattered
    query = torch.randn(len(rows), h, 1, d, generator=torch.Generator().manual_seed(1)).to(dtype)
    mask = Masks(lengths[:, None] - 1, dtype, None).of(view)
    assert isinstance(mask, Everything)
    out = Dense()(query, view, mask)
    torch.testing.assert_close(out.double(), slow(query, view), rtol=0, atol=TOLERANCE[dtype])
    kernel, _ = paged_decode(query[:, :, 0], view.keys, view.values, view.table, view.lengths, d**-0.5)
    torch.testing.assert_close(out[:, :, 0], kernel, rtol=0, atol=TOLERANCE[dtype])


def test_ka_08_a_row_that_holds_nothing_gives_zero() -> None:
    pages = Pages(1, 1, 8, 4, torch.float32, "cpu")
    cache = PagedCache.empty(pages, 2)
    for part in (torch.tensor([[0], [-1]]), torch.tensor([[1], [-1]])):
        cache.advance(part)
        view = cache.append(0, torch.ones(2, 1, 1, 8), torch.ones(2, 1, 1, 8))
    out = Dense()(torch.ones(2, 1, 1, 8), view, Masks(torch.tensor([[1], [-1]]), torch.float32, None).of(view))
    assert torch.equal(out[0], torch.ones(1, 1, 8)) and torch.equal(out[1], torch.zeros(1, 1, 8))


def test_ka_05_a_mask_of_the_callers_own_is_honoured() -> None:
    view, _ = filled([5, 3], 1, 8, torch.float32, scattered=False)
    query = torch.randn(2, 2, 1, 8, generator=torch.Generator().manual_seed(2))
    alone = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    alone[..., 4] = True
    out = Dense()(query, view, Masks(torch.tensor([[4], [2]]), torch.float32, alone).of(view))
    torch.testing.assert_close(out, view.gathered().values[:, :, 4:].expand(-1, 2, -1, -1))


def test_rows_that_are_laid_side_by_side_do_not_see_their_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where pages are gathered; the mask says that everything is seen, and padding lay nowhere until then."""
    monkeypatch.setattr("mmsdk.attention.dense.readable", lambda query, view: False)
    view, _ = filled([7, 40, 1], 2, 32, torch.float32, scattered=True)
    query = torch.randn(3, 4, 1, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(Dense()(query, view, Everything()).double(), slow(query, view), rtol=0, atol=1e-5)
