"""What planning may cost: no value is read back from the device, and no matrix of all tokens by all tokens is made of a long input.

Methods run on tensors that have shapes but no values; reading a value, or making a shape that hangs on one, fails there.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmsdk import plugins
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.types import Compressor
from mmsdk.vision.types import VisualTokens

PACKAGE = "mmsdk.tokencomp.methods"
# identity plans nothing and refuses every smaller budget
METHODS = [name for name in plugins.available(PACKAGE) if name != "identity" and isinstance(plugins.load(PACKAGE, name), Compressor)]


class Largest(TorchDispatchMode):
    """Notes the most elements that any one operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def without_values(grid: tuple[int, int, int], n: int) -> VisualTokens:
    with torch.device("meta"):
        return VisualTokens(
            torch.empty(n, 12), torch.empty(n, 3).long(), torch.empty(n), grid, torch.empty(grid[0]), torch.empty(n), torch.empty(n, 6)
        )


def method_of(name: str) -> Compressor:
    method = plugins.load(PACKAGE, name)
    assert isinstance(method, Compressor)
    return method


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_read_back_from_the_device(name: str) -> None:
    batch = [without_values((3, 4, 5), 60), without_values((3, 4, 5), 60), without_values((3, 4, 5), 41), without_values((1, 6, 6), 36)]
    results = method_of(name)(batch, [Budget(17), Budget(17), Budget(9), Budget(11)])
    assert [len(result.tokens) for result in results] == [17, 17, 9, 11]
    assert all(result.tokens.features.device.type == "meta" for result in results)


def test_a_method_that_reads_back_would_be_caught() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool((without_values((1, 2, 2), 4).features > 0).all())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("grid", [(1, 50, 80), (4, 25, 40)])
def test_no_matrix_of_all_pairs(name: str, grid: tuple[int, int, int]) -> None:
    """PP-02: 4,000 tokens, 100 kept; 16 million pairs, of which slices of 2 million may exist."""
    with Largest() as largest:
        method_of(name)([without_values(grid, 4000)], [Budget(100)])
    assert largest.elements <= 2**21


@pytest.mark.parametrize("name", METHODS)
def test_no_matrices_of_all_pairs_of_many_inputs(name: str) -> None:
    """PP-02: eight inputs of 1,200 tokens; pairs of one are few, those of all are 11 million."""
    with Largest() as largest:
        method_of(name)([without_values((1, 30, 40), 1200) for _ in range(8)], [Budget(100)] * 8)
    assert largest.elements <= 2**21
