"""Qwen's vision tower by itself; against transformers it is held in `tests/parity/test_qwen_vl.py`."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmsdk.errors import ModelError
from mmsdk.vision.tower import Tower, TowerConfig, attended, blocks

SMALL = TowerConfig(width=16, layers=1, heads=2, hidden=16, language=8, patch=2)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation gives."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own signature
        out = func(*args, **(kwargs or {}))
        self.entries = max([self.entries, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


@torch.inference_mode()
def test_pp_02_no_matrix_of_patches_by_patches_is_made() -> None:
    """4,096 patches, their scores included; a slice of attention stays within 8 MiB."""
    with Largest() as seen:
        out = Tower(SMALL).eval()(torch.randn(1, 4096, 24), (64, 64))
    assert out.features.shape == (1, 1024, 8) and out.saliency.sum().item() == pytest.approx(0.25, rel=1e-3)
    assert seen.entries <= 2**21 < 4096**2


@pytest.mark.parametrize("grid", [(4, 4), (6, 10), (10, 4), (2, 14)])
def test_windows_are_attention_under_a_mask(grid: tuple[int, int]) -> None:
    """Written out: a patch sees those whose rows and columns fall into the same window, those at the edges being smaller."""
    rows, columns = grid
    query, key, value = torch.randn(3, 2, 2, rows * columns, 4, generator=torch.Generator().manual_seed(rows))
    place = torch.arange(rows * columns)
    window = place // columns // 4 * 100 + place % columns // 4
    expected = F.scaled_dot_product_attention(query, key, value, window[:, None] == window)
    assert torch.allclose(attended(query, key, value, grid, 4), expected, atol=1e-6)


def test_squares_of_patches_are_read_row_by_row() -> None:
    x = torch.arange(24).view(1, 24, 1)
    assert blocks(x.float(), (4, 6), 2)[0].tolist() == [
        [6 * 2 * row + 2 * column + step for step in (0, 1, 6, 7)] for row in range(2) for column in range(3)
    ]


@pytest.mark.parametrize("change", [{"heads": 5}, {"layers": 0}, {"deep": (1,)}, {"full": (-1,)}, {"window": 3}])
def test_impossible_shapes_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelError):
        TowerConfig(**{"width": 16, "layers": 1, "heads": 2, "hidden": 16, "language": 8, **change})  # type: ignore[arg-type]
