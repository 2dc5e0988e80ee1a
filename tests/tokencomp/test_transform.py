"""Bases and truncation against their definitions, written out sum by sum."""

import math
from itertools import product

import pytest
import torch

from mmsdk.tokencomp.transform import band, box, cayley, dct, haar, inside, low, orthonormal, separable, sides

GRIDS = [(1, 4, 4), (1, 3, 7), (1, 5, 1), (2, 3, 5), (8, 8, 8)]


def cosine(u: int, j: int, n: int) -> float:
    return math.sqrt((1 if u == 0 else 2) / n) * math.cos(math.pi * u * (2 * j + 1) / (2 * n))


@pytest.mark.parametrize("n", [1, 2, 5, 8, 21])
def test_the_dct_is_its_definition_and_orthonormal(n: int) -> None:
    found = dct(n)
    expected = torch.tensor([[cosine(u, j, n) for j in range(n)] for u in range(n)], dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found @ found.T, torch.eye(n, dtype=torch.float64))


def test_haar_is_the_mean_then_differences_from_coarse_to_fine() -> None:
    half, root = 0.5, math.sqrt(0.5)
    expected = [[half, half, half, half], [half, half, -half, -half], [root, -root, 0, 0], [0, 0, root, -root]]
    torch.testing.assert_close(haar(4), torch.tensor(expected, dtype=torch.float64))
    for n in (1, 2, 16):
        torch.testing.assert_close(haar(n) @ haar(n).T, torch.eye(n, dtype=torch.float64))


@pytest.mark.parametrize("grid", [(1, 3, 5), (2, 3, 2)])
def test_a_separable_coefficient_is_the_sum_over_all_cells(grid: tuple[int, int, int]) -> None:
    x = torch.randn(math.prod(grid), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([[0, 2, 1], [grid[0] - 1, 0, 1], [0, 1, 0]])
    basis = separable("dct", grid, index)
    cells = list(product(*(range(side) for side in grid)))
    for row, place in zip(basis.analysis @ x, index.tolist(), strict=True):
        terms = [math.prod(cosine(u, j, n) for u, j, n in zip(place, cell, grid, strict=True)) * x[i] for i, cell in enumerate(cells)]
        torch.testing.assert_close(row, torch.stack(terms).sum(dim=0))
    assert torch.equal(basis.synthesis, basis.analysis.T) and basis.size == len(x)


@pytest.mark.parametrize("grid", GRIDS)
def test_all_coefficients_give_the_tokens_back_padded_or_not(grid: tuple[int, int, int]) -> None:
    x = torch.randn(math.prod(grid), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for name in ("dct", "haar"):
        basis = separable(name, grid, inside(sides(name, grid)))
        torch.testing.assert_close(basis.synthesis @ (basis.analysis @ x), x)


def test_haar_pads_by_reflection() -> None:
    """Three cells a, b, c are transformed as a, b, c, b."""
    basis = separable("haar", (1, 1, 3), inside((1, 1, 4)))
    assert basis.size == 4
    torch.testing.assert_close(
        basis.analysis @ torch.tensor([1.0, 2.0, 4.0]).double(), haar(4) @ torch.tensor([1.0, 2.0, 4.0, 2.0]).double()
    )


@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 3, 7), (1, 12, 21), (4, 6, 3)])
def test_low_frequencies_come_by_their_key_then_by_place(shape: tuple[int, int, int]) -> None:
    def key(place: tuple[int, ...]) -> int:
        """In whole numbers: u/H squared over a common denominator."""
        return sum((u * math.prod(shape) // side) ** 2 for u, side in zip(place, shape, strict=True))

    expected = sorted(product(*(range(side) for side in shape)), key=lambda place: (key(place), place))
    for count in (1, 4, 7, math.prod(shape)):
        assert low(shape, count).tolist() == [list(place) for place in expected[:count]]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 6, 9, 20, 75, 180])
@pytest.mark.parametrize("grid", [(16, 16), (12, 21), (21, 12), (14, 18), (5, 3), (1, 40), (13, 1)])
def test_the_box_of_a_picture_has_the_nearest_aspect_and_among_equals_the_largest_area(grid: tuple[int, int], most: int) -> None:
    height, width = grid
    fitting = [(a, b) for a in range(1, height + 1) for b in range(1, width + 1) if a * b <= most]
    aspect = {(a, b): round(abs(math.log(a / b) - math.log(height / width)), 9) for a, b in fitting}
    nearest = min(aspect.values())
    largest = max(a * b for a, b in fitting if aspect[a, b] == nearest)
    shape = box((1, *grid), most)
    assert shape[0] == 1 and aspect[shape[1:]] == nearest and shape[1] * shape[2] == largest


def test_boxes_of_the_budgets_that_are_trained() -> None:
    assert box((1, 16, 16), 9) == (1, 3, 3) and box((1, 16, 16), 4) == (1, 2, 2)
    assert box((1, 24, 24), 25) == (1, 5, 5)
    assert box((8, 8, 8), 4) == (1, 1, 1) and box((8, 8, 8), 39) == (3, 3, 3)


@pytest.mark.parametrize(("side", "parts"), [(16, 3), (7, 7), (21, 4), (5, 1)])
def test_parts_of_a_side_are_contiguous_mirrored_and_never_empty(side: int, parts: int) -> None:
    found = band(torch.arange(side), side, parts)
    assert found.unique().tolist() == list(range(parts)) and (found.diff() >= 0).all()
    sizes = found.bincount().tolist()
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("k", [1, 2, 9])
def test_cayley_is_orthogonal_and_starts_at_the_identity(k: int) -> None:
    a = torch.randn(k, k, generator=torch.Generator().manual_seed(k))
    q = cayley(a)
    torch.testing.assert_close(q @ q.T, torch.eye(k), atol=1e-5, rtol=0)
    skew = a - a.T
    torch.testing.assert_close(q, (torch.eye(k) - skew) @ torch.linalg.inv(torch.eye(k) + skew), atol=1e-5, rtol=0)
    assert torch.equal(cayley(torch.zeros(k, k)), torch.eye(k))


def test_means_of_parts_made_orthonormal_are_the_inverse_dct() -> None:
    """Where parts are equal, the means of low frequencies are those of the small picture but for a factor each."""
    basis, grid = separable("dct", (1, 6, 8), inside((1, 3, 2))), (6, 8)
    part = torch.tensor([y // 2 * 2 + x // 4 for y in range(grid[0]) for x in range(grid[1])])
    means = torch.stack([basis.synthesis[part == c].mean(dim=0) for c in range(6)])
    torch.testing.assert_close(orthonormal(means), torch.kron(dct(3), dct(2)).T)
