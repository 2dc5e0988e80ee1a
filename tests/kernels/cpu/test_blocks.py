"""Block-sparse attention in C++ against dense attention with the mask written out, in float64."""

import pytest
import torch
from torch import Tensor

from mmsdk.kernels.case import TOLERANCE
from mmsdk.kernels.cpu import blocks
from mmsdk.kernels.cpu.library import library

pytestmark = pytest.mark.skipif(library().functions is None, reason=library().state)

# rows of the batch, heads, those that they share, queries, keys, channels: ends that fill no vector of queries, no four keys or channels
SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (2, 4, 2, 70, 90, 16),
    (1, 6, 2, 17, 203, 13),
    (1, 1, 1, 130, 64, 72),
    (1, 2, 1, 257, 300, 128),
    (3, 2, 2, 33, 65, 64),
]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def starts(seed: int, b: int, h: int, length: int, count: int) -> Tensor:
    """Rising from 0 to the length, some blocks empty, others of any length."""
    inside = torch.randint(0, length + 1, (b, h, count - 1), generator=torch.Generator().manual_seed(seed)).sort(-1).values
    ends = torch.zeros(b, h, 1, dtype=torch.int64)
    return torch.cat((ends, inside, ends + length), -1)


def slow(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, rows: Tensor, columns: Tensor, scale: float) -> Tensor:
    """Query by query."""
    b, h, s, _ = query.shape
    g, out = keys.shape[1], torch.zeros(query.shape, dtype=torch.float64)
    for batch in range(b):
        for head in range(h):
            shared = head * g // h
            of_key = torch.searchsorted(columns[batch, shared, 1:].contiguous(), torch.arange(keys.shape[2]), right=True)
            of_row = torch.searchsorted(rows[batch, head, 1:].contiguous(), torch.arange(s), right=True)
            k, v = keys[batch, shared].double(), values[batch, shared].double()
            for i in range(s):
                read = mask[batch, head, of_row[i]][of_key]
                if read.any():
                    shares = (scale * k[read] @ query[batch, head, i].double()).softmax(0)
                    out[batch, head, i] = shares @ v[read]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_attention_over_what_the_mask_names(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    b, h, g, s, t, d = shape
    if dtype == torch.bfloat16:
        d += d % 2
    query, keys, values = (drawn(n, b, heads, length, d).to(dtype) for n, (heads, length) in enumerate(((h, s), (g, t), (g, t))))
    rows, columns = starts(5, b, h, s, 6), starts(6, b, g, t, 9)
    mask = torch.rand(b, h, 6, 9, generator=torch.Generator().manual_seed(7)) < 0.5
    mask[:, :, 2] = False
    given = (query, keys, values, mask, rows, columns, 0.4)
    out = blocks.attend(*given)
    torch.testing.assert_close(out.double(), slow(*given), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert out.dtype == dtype and not out.isnan().any()


def test_threads_strides_and_shared_starts_change_no_bit() -> None:
    query, keys, values = (drawn(n, 1, 3, 200, 48) for n in range(3))
    rows, columns = (starts(n, 1, 1, 200, 5) for n in (3, 4))
    mask = torch.rand(1, 3, 5, 5, generator=torch.Generator().manual_seed(8)) < 0.6
    out = blocks.attend(query, keys, values, mask, rows, columns, 0.3)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, keys, values)]
    turned = mask.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(blocks.attend(*apart, turned, rows.expand(1, 3, -1), columns.int(), 0.3), out)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(blocks.attend(query, keys, values, mask, rows, columns, 0.3), out)
    finally:
        torch.set_num_threads(threads)


def test_large_scores_and_what_is_no_number_stay_what_they_are() -> None:
    """Scores of thousands do not overflow; a query that is no number makes its own row none and no other."""
    query, keys, values = (drawn(n, 1, 1, 20, 16) for n in range(3))
    bounds, mask = torch.tensor([[[0, 20]]]), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    given = (1000 * query, keys, values, mask, bounds, bounds, 1.0)
    torch.testing.assert_close(blocks.attend(*given).double(), slow(*given), rtol=1e-5, atol=1e-5)
    broken = query.clone()
    broken[0, 0, 3, 5] = torch.nan
    out = blocks.attend(broken, keys, values, mask, bounds, bounds, 1.0)
    assert out[0, 0, 3].isnan().all() and not out[0, 0, [0, 1, 2, 4, 19]].isnan().any()


def test_what_it_is_not_for_is_told() -> None:
    x = torch.zeros(1, 1, 2, 4)
    assert (
        blocks.here(x, x, x)
        and not blocks.here(x.bfloat16(), x, x)
        and not blocks.here(x.half(), x.half(), x.half())
        and not blocks.here(x[:, :, :0], x, x)
    )
    learned = x.clone().requires_grad_()
    assert not blocks.here(learned, x, x)
    with torch.no_grad():
        assert blocks.here(learned, x, x)
