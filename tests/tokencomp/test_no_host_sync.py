"""Methods plan on the device: run on tensors that have shapes but no values, reading a value, or a shape that hangs on one, fails."""

import pytest
import torch

from mmsdk import plugins
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.types import Compressor
from mmsdk.vision.types import VisualTokens

METHODS = ["cdpruner", "divprune", "evs", "fastvid", "p4q", "prumerge", "simplecluster", "visionzip", "vispruner"]


def without_values(grid: tuple[int, int, int], n: int) -> VisualTokens:
    with torch.device("meta"):
        return VisualTokens(
            torch.empty(n, 12), torch.empty(n, 3).long(), torch.empty(n), grid, torch.empty(grid[0]), torch.empty(n), torch.empty(n, 6)
        )


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_read_back_from_the_device(name: str) -> None:
    method = plugins.load("mmsdk.tokencomp.methods", name)
    assert isinstance(method, Compressor)
    batch = [without_values((3, 4, 5), 60), without_values((3, 4, 5), 60), without_values((3, 4, 5), 41), without_values((1, 6, 6), 36)]
    results = method(batch, [Budget(17), Budget(17), Budget(9), Budget(11)])
    assert [len(result.tokens) for result in results] == [17, 17, 9, 11]
    assert all(result.tokens.features.device.type == "meta" for result in results)


def test_a_method_that_reads_back_would_be_caught() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool((without_values((1, 2, 2), 4).features > 0).all())
