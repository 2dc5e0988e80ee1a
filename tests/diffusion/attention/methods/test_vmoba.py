"""VMoBA, query by query: chunks by their mean key, gates between 0 and 1, its own chunk and the largest others."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmsdk.diffusion.attention.methods.vmoba import Vmoba
from mmsdk.diffusion.attention.types import Grid, Place, Selection

Seen = Callable[[Selection], Tensor]
GRID = Grid(6, 9, 28)


def chunk_of(grid: Grid, shape: tuple[int, int, int]) -> list[int]:
    counts = [-(-side // step) for side, step in zip((grid.frames, grid.height, grid.width), shape, strict=True)]
    places = itertools.product(range(grid.frames), range(grid.height), range(grid.width))
    return [((t // shape[0]) * counts[1] + y // shape[1]) * counts[2] + x // shape[2] for t, y, x in places]


@pytest.mark.parametrize(("layer", "shape"), [(0, (2, 9, 28)), (1, (6, 4, 13)), (2, (4, 4, 13)), (3, (2, 9, 28))])
@pytest.mark.parametrize("threshold", [0.25, 0.6])
def test_every_query_reads_what_it_chose(
    layer: int, shape: tuple[int, int, int], threshold: float, seen: Callable[[Selection], Tensor]
) -> None:
    query, keys, values = (torch.randn(1, 1, GRID.tokens, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    method = Vmoba(threshold=threshold, block=16)
    choice = method(query, keys, values, Place(GRID, step=12, steps=50, layer=layer, layers=30))
    assert isinstance(choice, Selection) and method.chunk(GRID, layer) == shape
    chunk = torch.tensor(chunk_of(GRID, shape))
    means = torch.stack([keys[0, 0, chunk == c].double().mean(0) for c in range(int(chunk.max()) + 1)])
    wanted = torch.zeros(GRID.tokens, len(means), dtype=torch.bool)
    for i in range(GRID.tokens):
        gates = means @ query[0, 0, i].double()
        gates = (gates - gates.min()) / (gates.max() - gates.min())
        shares, own = gates / gates.sum(), int(chunk[i])
        wanted[i, own] = True
        total = shares[own].item()
        for rank, j in enumerate(sorted(set(range(len(means))) - {own}, key=lambda j: -shares[j].item())):
            if rank and total >= threshold:
                break
            wanted[i, j] = True
            total += shares[j].item()
    read = seen(choice)[0, 0]
    assert choice.queries.order is not None
    order, bounds = choice.queries.order[0, 0], choice.queries.bounds(torch.device("cpu"))[0, 0].tolist()
    for low, high in itertools.pairwise(bounds):
        block = order[low:high]
        assert torch.equal(read[block[0]], wanted[block].any(0)[chunk])
    assert math.isclose(choice.density(), read.double().mean().item(), rel_tol=1e-9)
