"""What methods share: choosing by score, pairs of tokens in slices, clusters without an empty group."""

import pytest
import torch

from mmsdk.kernels.ops import assign_and_merge
from mmsdk.kernels.ops.farthest_point import farthest_point
from mmsdk.tokencomp import density, similarity
from mmsdk.tokencomp.clustering import spherical_kmeans
from mmsdk.tokencomp.density import density_peaks
from mmsdk.tokencomp.ranking import TIE, first_best, first_in_tiers, others, rank_within, ranked, rescaled, top, top_within
from mmsdk.tokencomp.similarity import best_match, nearest_other, unit


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_less_than_a_millionth_apart_the_earlier_wins() -> None:
    """PP-12."""
    scores = torch.tensor([[0.2, 0.5, 0.5 + 5e-7, 0.1, 0.5 - 5e-7], [0.9, 0.5, 0.5 + 5e-6, 0.1, 0.5]])
    assert first_best(scores[:, 1:]).tolist() == [0, 1]
    assert top(scores, 2).tolist() == [[1, 2], [0, 2]]
    assert top(scores, 0).shape == (2, 0)
    assert ranked(torch.tensor([0.3, 0.5, 0.3, 0.9])).tolist() == [3, 1, 0, 2]


def test_noise_of_another_order_of_summing_changes_nothing() -> None:
    """PP-12: every score occurs many times, so that the choice hangs on ties alone."""
    exact = torch.randint(0, 7, (300,), generator=torch.Generator().manual_seed(1)) / 7
    for seed in range(5):
        noisy = exact + 2e-7 * drawn(300, seed=seed).clamp(-2, 2)
        assert torch.equal(top(noisy, 100), top(exact, 100)) and int(first_best(noisy)) == int(first_best(exact))


@pytest.mark.parametrize("half", [0.1, 0.5, 0.50000050, 0.9999995])
def test_near_ties_are_equal_wherever_they_lie(half: float) -> None:
    """PP-12: scores 1.2e-7 and 9e-7 apart, on every side of what rounding to millionths would part."""
    one = torch.zeros(1, 3, dtype=torch.int64)
    for shift in range(20):
        low = half + shift * 1e-7
        for gap in (1.2e-7, 8e-7):
            scores = torch.tensor([[low, low + gap, 0.0]])
            assert ranked(scores).tolist() == [[0, 1, 2]]
            assert top_within(scores, one, torch.tensor([[1]])).tolist() == [[True, False, False]]
            assert first_in_tiers(one, scores, 1, tiers=1).tolist() == top(scores, 1).tolist() == [[0]]
        assert ranked(torch.tensor([low, low + 3e-6])).tolist() == [1, 0]


def test_the_best_of_each_group_equal_the_best_of_a_group_alone() -> None:
    """PP-12: many scores a few ten-millionths apart, so that what is equal to the last one chosen decides."""
    generator = torch.Generator().manual_seed(6)
    scores = 0.5 + 1e-7 * torch.randint(0, 60, (2, 40), generator=generator)
    group = torch.randint(0, 3, (2, 40), generator=generator)
    quota = torch.tensor([[3, 0, 5], [1, 50, 4]])
    found = top_within(scores, group, quota)
    for b in range(2):
        for g in range(3):
            mine = (group[b] == g).nonzero()[:, 0]
            best = mine[top(scores[b, mine], min(int(quota[b, g]), len(mine)))]
            assert torch.equal((found[b] & (group[b] == g)).nonzero()[:, 0], best)


def test_an_order_is_of_tiers_that_begin_at_their_largest() -> None:
    """PP-12: against a loop, with scores so close that tiers follow one another without a gap."""
    scores = 0.5 + 1e-7 * torch.randint(0, 90, (3, 50), generator=torch.Generator().manual_seed(7))
    for row, order in zip(scores, ranked(scores), strict=True):
        left, expected = list(range(50)), list[int]()
        while left:
            most = row[left].max()
            tier = [i for i in left if float(-row[i]) <= float(-most + TIE)]
            expected, left = expected + tier, [i for i in left if i not in tier]
        assert order.tolist() == expected
    assert ranked(torch.empty(2, 0)).shape == (2, 0) and ranked(torch.tensor([-torch.inf, 1.0, torch.inf])).tolist() == [2, 1, 0]


def test_ranks_within_groups_equal_a_loop() -> None:
    group = torch.randint(0, 4, (2, 30), generator=torch.Generator().manual_seed(2))
    order = torch.stack([torch.randperm(30, generator=torch.Generator().manual_seed(s)) for s in (3, 4)])
    found = rank_within(order, group, 4)
    for b in range(2):
        seen = [0] * 4
        for token in order[b].tolist():
            assert int(found[b, token]) == seen[int(group[b, token])]
            seen[int(group[b, token])] += 1


def test_tiers_others_and_rescaling() -> None:
    tier, scores = torch.tensor([[1, 0, 1, 0]]), torch.tensor([[0.1, 0.2, 0.4, 0.3]])
    assert first_in_tiers(tier, scores, 3, tiers=2).tolist() == [[1, 2, 3]]
    assert others(torch.tensor([[3, 0]]), 5).tolist() == [[1, 2, 4]]
    assert rescaled(torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 5.0]])).tolist() == [[0.0, 1.0, 0.5], [1.0, 1.0, 1.0]]


def test_unit_vectors_of_zero_and_of_huge_entries() -> None:
    """PP-10."""
    z = unit(torch.tensor([[0.0, 0.0], [6e4, 6e4], [-6e4, 0.0]], dtype=torch.float16))
    torch.testing.assert_close(z, torch.tensor([[0.0, 0.0], [0.5**0.5, 0.5**0.5], [-1.0, 0.0]]))
    torch.testing.assert_close(unit(torch.full((1, 9), -1e37)), torch.full((1, 9), -1 / 3))


def test_slices_change_nothing_and_hold_no_matrix_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """PP-02: the same answers when a slice holds a few rows; each equals the whole matrix."""
    z, to = unit(drawn(2, 33, 8)), unit(drawn(2, 7, 8, seed=1))
    x, group = drawn(2, 33, 8), torch.arange(33).expand(2, -1) % 3
    alive = drawn(2, 33, seed=5) > -1
    pairs = z @ z.transpose(1, 2) - 9 * torch.eye(33)
    value, index = (z @ to.transpose(1, 2)).max(dim=2)
    whole = density_peaks(x, group, alive, groups=3, neighbours=4)
    monkeypatch.setattr(similarity, "ENTRIES", 40)
    monkeypatch.setattr(assign_and_merge, "ENTRIES", 40)
    monkeypatch.setattr(density, "ENTRIES", 300)
    found = best_match(z, to)
    torch.testing.assert_close(found[0], value)
    assert torch.equal(found[1], index)
    torch.testing.assert_close(nearest_other(z), pairs.amax(dim=2))
    torch.testing.assert_close(density_peaks(x, group, alive, groups=3, neighbours=4), whole)


def test_pairs_apart_match_only_where_there_is_nothing_else() -> None:
    z = unit(drawn(1, 6, 8))
    apart = torch.zeros(1, 6, 6, dtype=torch.bool)
    apart[0, 0, 0] = apart[0, 1] = True
    cosine, index = best_match(z, z, apart)
    assert int(index[0, 0]) != 0 and index[0, 1:].tolist() == [1, 2, 3, 4, 5]
    torch.testing.assert_close(cosine[0, 1:], torch.ones(5))


def test_seeds_are_distinct_even_among_copies_and_zeros() -> None:
    """PP-10."""
    z = unit(torch.cat([drawn(1, 2, 6).repeat(1, 3, 1), torch.zeros(1, 4, 6)], dim=1))
    seeds = farthest_point(z, torch.tensor([1]), 10)
    assert seeds[0].sort().values.tolist() == list(range(10))


@pytest.mark.parametrize("m", [3, 8, 12])
def test_no_group_is_left_empty(m: int) -> None:
    """Three distinct directions for more groups: who is moved is among those that their group can spare."""
    z = unit(drawn(2, 3, 6))[:, torch.arange(12) % 3]
    labels = spherical_kmeans(z, farthest_point(z, torch.zeros(2, dtype=torch.int64), m))
    for row, vectors in zip(labels, z, strict=True):
        assert torch.equal(row.unique(), torch.arange(m))
        for group in range(m):
            members = vectors[row == group]
            torch.testing.assert_close(members, members[:1].expand_as(members))
