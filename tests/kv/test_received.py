"""Attention received from a few rows against the whole matrix, in float64."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmsdk.kv.received import received
from mmsdk.kv.types import LayerView


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (5, 1)])
def test_rows_equal_the_whole_matrix(heads: int, groups: int, dtype: torch.dtype) -> None:
    """PP-01, KA-12: the mean over heads and real rows of softmax over what each row sees; padding neither asks nor is seen."""
    b, r, t, e = 3, 5, 40, 8
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(b, heads, r, e, generator=generator).to(dtype)
    keys = torch.randn(b, groups, t, e, generator=generator).to(dtype)
    positions = torch.arange(t).expand(b, -1).clone()
    positions[1, :7] = positions[2, ::3] = -1
    asking = torch.tensor([[-1, 0, 10, 38, 39], [-1, -1, -1, -1, 12], [5, 6, 7, 8, 50]])
    view = LayerView(keys, keys, positions, positions >= 0, (positions >= 0).sum(1))

    expanded = keys.double().repeat_interleave(heads // groups, dim=1)
    scores = query.double() @ expanded.transpose(2, 3) / e**0.5
    for row in range(b):
        weights = []
        for i, at in enumerate(asking[row].tolist()):
            seen = (positions[row] >= 0) & (positions[row] <= at)
            if at >= 0 and seen.any():
                weights.append(scores[row, :, i].masked_fill(~seen, -torch.inf).softmax(-1).mean(0))
        expected = torch.stack(weights).sum(0) / (asking[row] >= 0).sum()
        torch.testing.assert_close(received(query, asking, view)[row].double(), expected, rtol=1e-4, atol=1e-6)
    # those of the last columns need not look behind themselves, padding among them or not
    last = query, positions[:, -r:], view
    torch.testing.assert_close(received(*last, newest=True), received(*last))


def test_rows_without_anyone_to_ask_or_to_see_get_nothing() -> None:
    """KA-08, PP-10: no NaN from a row that sees nothing, and none from 6e4 in half precision."""
    keys = torch.full((1, 1, 4, 8), 6e4, dtype=torch.float16)
    positions = torch.arange(4)[None] + 5
    view = LayerView(keys, keys, positions, positions >= 0, torch.tensor([4]))
    assert torch.equal(received(keys[:, :, :1], torch.tensor([[2]]), view), torch.zeros(1, 4))
    assert torch.equal(received(keys[:, :, :1], torch.tensor([[-1]]), view), torch.zeros(1, 4))
    assert torch.equal(received(keys[:, :, :1], torch.tensor([[9]]), view), torch.full((1, 4), 0.25))


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation gives."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own signature
        out = func(*args, **(kwargs or {}))
        self.entries = max([self.entries, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


@pytest.mark.parametrize("r", [1, 2000])
def test_no_matrix_of_tokens_by_tokens_is_made(r: int) -> None:
    """PP-02: 4,096 entries, one row or many; a slice of the weights stays within 8 MiB."""
    t = 4096
    keys, positions = torch.randn(1, 2, t, 8), torch.arange(t)[None]
    view = LayerView(keys, keys, positions, positions >= 0, torch.tensor([t]))
    with Largest() as seen:
        got = received(torch.randn(1, 2, r, 8), torch.full((1, r), t), view)
    assert abs(float(got.sum()) - 1) < 1e-4
    assert seen.entries <= 2**21 < t * t
