"""Chains of choices in C++ against the torch loops beside them, and against loops in float64 that start anew at every step."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.errors import InputError
from mmsdk.kernels.cpu import choosing
from mmsdk.kernels.cpu.library import library
from mmsdk.kernels.ops import dpp_greedy as dpp
from mmsdk.kernels.ops import drop_twins as twins
from mmsdk.kernels.ops import farthest_point as farthest_points

pytestmark = pytest.mark.skipif(library().functions is None, reason=library().state)

# inputs, tokens, channels, choices, distinct tokens: rows of all pairs, rows from vectors, ends that fill no vector and no block of tokens.
SHAPES = [
    (1, 1, 1, 1, 1),
    (3, 63, 24, 1, 63),
    (2, 63, 24, 7, 63),
    (1, 21, 24, 21, 21),
    (5, 130, 70, 11, 130),
    (1, 129, 70, 44, 129),
    (2, 30, 24, 17, 4),
    (2, 90, 9, 5, 3),
]


def drawn(b: int, n: int, d: int, distinct: int) -> Tensor:
    """Unit vectors, so many of them distinct, again and again."""
    z = F.normalize(torch.randn(b, distinct, d, generator=torch.Generator().manual_seed(n)), dim=2)
    return z[:, torch.arange(n) % distinct]


def best(scores: Tensor, taken: list[int]) -> int:
    """The earliest within a millionth of the largest score of those that are not taken."""
    scores = scores.clone()
    scores[taken] = -torch.inf
    return int((scores >= scores.max() - 1e-6).nonzero()[0])


def slow_farthest(z: Tensor, first: int, count: int) -> list[int]:
    products, chosen = z.double() @ z.double().T, [first]
    while len(chosen) < count:
        chosen.append(best(-products[:, chosen].amax(dim=1), chosen))
    return chosen


def slow_greedy(y: Tensor, count: int) -> list[int]:
    """Gains are what is left of the determinant of the chosen tokens' products: det(L of S + i) / det(L of S)."""
    products, chosen = y.double() @ y.double().T, list[int]()
    for _ in range(count):
        inside = products[chosen][:, chosen]
        explained = torch.linalg.solve(inside, products[chosen]) if chosen else products[chosen]
        chosen.append(best(products.diagonal() - (products[chosen] * explained).sum(dim=0), chosen))
    return chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("b", "n", "d", "count", "distinct"), SHAPES)
def test_seeds_are_those_of_the_loops(b: int, n: int, d: int, count: int, distinct: int, dtype: torch.dtype) -> None:
    """PP-10 and PP-12: copies tie at every step, and every row begins at another token."""
    z, first = drawn(b, n, d, distinct).to(dtype), torch.arange(b) * 7 % n
    found = choosing.farthest(z, first, count)
    assert found.dtype == torch.int64 and torch.equal(found, farthest_points.OP.reference(z, first, count)[0])
    assert found.tolist() == [slow_farthest(row, int(start), count) for row, start in zip(z, first, strict=True)]
    assert torch.equal(farthest_points.farthest_point(z, first, count), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("b", "n", "d", "count", "distinct"), SHAPES)
def test_determinants_are_those_of_the_loops(b: int, n: int, d: int, count: int, distinct: int, dtype: torch.dtype) -> None:
    """PP-12: qualities differ; behind the last independent token there is nothing left but rounding."""
    count = min(count, distinct, d)
    y = (drawn(b, n, d, distinct) * (1 + torch.arange(n) % distinct % 5)[:, None] / 5).to(dtype)
    found = choosing.greedy(y, count)
    assert torch.equal(found, dpp.OP.reference(y, count)[0])
    assert found.tolist() == [slow_greedy(row, count) for row in y]
    assert torch.equal(dpp.dpp_greedy(y, count), found)


@pytest.mark.parametrize("step", [1, 8, 100])
@pytest.mark.parametrize(("b", "n", "d", "count", "distinct"), SHAPES)
def test_twins_that_are_left_are_those_of_the_loops(b: int, n: int, d: int, count: int, distinct: int, step: int) -> None:
    """PP-12: copies tie in every round."""
    z = drawn(b, n, d, distinct)
    pairs = z @ z.mT
    found = choosing.untwinned(pairs, count, step)
    assert found.dtype == torch.int64 and torch.equal(found, twins.OP.reference(pairs, count, step)[0])
    assert torch.equal(twins.drop_twins(pairs, count, step), found)
    # noise below a millionth, as another order of adding brings it, decides nothing
    noise = 2e-8 * torch.randn(pairs.shape, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    if distinct < n:
        assert torch.equal(choosing.untwinned(pairs + noise, count, step), found)
    assert torch.equal(torch.cat([choosing.untwinned(one[None], count, step) for one in pairs]), found)


def test_what_is_chosen_stays_the_same_from_rows_and_from_pairs_alone_and_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    z, first = drawn(5, 70, 40, 70), torch.tensor([3, 0, 69, 12, 5])
    found, greedy = choosing.farthest(z, first, 40), choosing.greedy(z, 40)
    for entries in (2 * 70 * 70, 70 * 70 - 1):
        monkeypatch.setattr(choosing, "ENTRIES", entries)
        assert torch.equal(choosing.farthest(z, first, 40), found) and torch.equal(choosing.greedy(z, 40), greedy)
    for i in range(5):
        assert torch.equal(choosing.farthest(z[i : i + 1], first[i : i + 1], 40)[0], found[i])
        assert torch.equal(choosing.greedy(z[i : i + 1], 40)[0], greedy[i])


def test_tokens_that_do_not_lie_side_by_side() -> None:
    z, first = drawn(2, 40, 48, 40), torch.tensor([1, 2], dtype=torch.int32)
    apart = z.transpose(1, 2).contiguous().transpose(1, 2)
    assert not apart.is_contiguous() and not z[:, ::2, ::2].is_contiguous()
    assert torch.equal(choosing.farthest(apart, first, 30), choosing.farthest(z, first, 30))
    assert torch.equal(choosing.greedy(apart, 30), choosing.greedy(z, 30))
    part = z[:, ::2, ::2]
    assert torch.equal(choosing.farthest(part, first, 9), farthest_points.OP.reference(part, first, 9)[0])


def test_zeros_and_no_numbers_are_chosen_as_torch_chooses() -> None:
    """PP-10: tokens without a direction come one by one; where a score is no number the first token is taken."""
    z, first = drawn(1, 9, 24, 9), torch.tensor([4])
    z[:, 3:6] = 0
    found = choosing.farthest(z, first, 9)
    assert torch.equal(found, farthest_points.OP.reference(z, first, 9)[0]) and found[0].sort().values.tolist() == list(range(9))
    assert torch.equal(choosing.greedy(z, 9), dpp.OP.reference(z, 9)[0])
    z[:, 7] = torch.nan
    for count in (3, 9):
        assert torch.equal(choosing.farthest(z, first, count), farthest_points.OP.reference(z, first, count)[0])
        assert torch.equal(choosing.greedy(z, count), dpp.OP.reference(z, count)[0])


@pytest.mark.parametrize("first", [[9], [-1]])
def test_a_first_token_that_is_none_is_refused(first: list[int]) -> None:
    with pytest.raises(InputError, match="9 tokens"):
        choosing.farthest(drawn(1, 9, 4, 9), torch.tensor(first), 2)


def test_threads_that_share_a_long_input_change_nothing() -> None:
    """2,100 tokens of 512 channels, few of which are wanted: a step reads more than a million numbers."""
    z, first, threads = drawn(1, 2100, 512, 2100), torch.tensor([5]), torch.get_num_threads()
    found = list[tuple[Tensor, Tensor]]()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append((choosing.farthest(z, first, 12), choosing.greedy(z, 12)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][0][0].tolist() == slow_farthest(z[0], 5, 12) and found[0][1][0].tolist() == slow_greedy(z[0], 12)
