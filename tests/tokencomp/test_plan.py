"""Plans applied to tokens, audits read back, fidelity measured: each against a slow loop."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from mmsdk.errors import BudgetError, PluginError
from mmsdk.tokencomp import fidelity as tokencomp_fidelity
from mmsdk.tokencomp.audit import compose, dropped, owners
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.fidelity import best_cosine, fidelity
from mmsdk.tokencomp.methods.identity import Identity
from mmsdk.tokencomp.methods.random import Random
from mmsdk.tokencomp.methods.uniform import Uniform
from mmsdk.tokencomp.plan import keep, merge
from mmsdk.tokencomp.stream import form
from mmsdk.vision.types import VisualTokens


def tokens_of(frames: int, rows: int, columns: int) -> VisualTokens:
    n = frames * rows * columns
    generator = torch.Generator().manual_seed(n)
    return VisualTokens(
        features=torch.randn(n, 6, generator=generator),
        positions=torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns)).reshape(n, 3),
        weight=torch.randint(1, 5, (n,), generator=generator).float(),
        grid=(frames, rows, columns),
        times=torch.arange(frames).float(),
        saliency=torch.rand(n, generator=generator),
    )


def test_merge_equals_a_slow_loop() -> None:
    source = tokens_of(2, 3, 4)
    labels = torch.arange(24) * 7 % 5
    labels[3] = -1
    result = merge(source, labels, 5, method="loop")
    for group in range(5):
        members = [i for i in range(24) if int(labels[i]) == group]
        weight = sum(float(source.weight[i]) for i in members)
        mean = sum(source.features[i].double() * float(source.weight[i]) for i in members) / weight
        centre = [math.floor(sum(int(source.positions[i, a]) * float(source.weight[i]) for i in members) / weight + 0.5) for a in range(3)]
        (slot,) = {int(result.audit.assignment[i]) for i in members}
        torch.testing.assert_close(result.tokens.features[slot].double(), mean, rtol=1e-5, atol=1e-6)
        assert result.tokens.positions[slot].tolist() == centre
        assert float(result.tokens.weight[slot]) == weight
    assert int(result.audit.assignment[3]) == -1


def test_a_dropped_infinity_does_not_reach_its_neighbours() -> None:
    source = tokens_of(1, 2, 2)
    source.features[1] = float("inf")
    result = merge(source, torch.tensor([0, -1, 1, 1]), 2, method="drop")
    assert torch.isfinite(result.tokens.features).all()


def test_compose_tells_the_chain_in_source_tokens() -> None:
    source = tokens_of(1, 4, 4)
    first = keep(source, torch.tensor([9, 2, 5, 14]), method="a", seconds=1.0)
    second = merge(first.tokens, torch.tensor([0, 0, -1, 1]), 2, method="b", seconds=2.0)
    chained = compose(first.audit, second.audit)
    assert chained.method == "a+b" and chained.seconds == 3.0
    alive = {i: int(chained.assignment[i]) for i in range(16) if int(chained.assignment[i]) >= 0}
    assert alive == {2: 0, 5: 0, 14: 1}
    assert int(dropped(chained).sum()) == 13
    cells = owners(chained, source.positions, source.grid)
    assert cells.shape == (1, 4, 4) and int(cells[0, 3, 2]) == 1 and int(cells[0, 0, 2]) == 0 and int(cells[0, 0, 0]) == -1


def test_fidelity_equals_its_definition() -> None:
    source = tokens_of(1, 5, 5)
    result = keep(source, torch.tensor([0, 7, 13, 21]), method="fixed")
    x, k = source.features.double(), result.tokens.features.double()
    error = sum(min(float((a - b).square().sum()) for b in k) for a in x)
    spread = sum(float((a - x.mean(0)).square().sum()) for a in x)
    cosines = [max(float(a @ b / (a.norm() * b.norm())) for b in k) for a in x]
    measured = fidelity(source, result, tau=0.5)
    assert measured.nqe == pytest.approx(error / spread, rel=1e-4)
    assert measured.coverage == pytest.approx(sum(c >= 0.5 for c in cosines) / 25)
    assert measured.cosine == pytest.approx(sum(cosines) / 25, rel=1e-4)


def test_fidelity_of_very_many_tokens_is_that_of_some_at_even_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    source, kept = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 11, 40])
    assignment = torch.full((64,), -1).index_put((kept,), torch.arange(3))
    asked = tokencomp_fidelity.preserved(source[::3], source[kept], assignment[::3])
    monkeypatch.setattr(tokencomp_fidelity, "MOST", 64 * 8)
    assert tokencomp_fidelity.preserved(source, source[kept], assignment) == asked


def test_fidelity_of_everything_is_perfect_and_of_the_mean_is_one() -> None:
    source = tokens_of(1, 4, 4)
    perfect = fidelity(source, Identity()([source], [Budget(16)])[0])
    assert perfect.nqe == 0.0 and perfect.coverage == 1.0
    flat = VisualTokens(source.features, source.positions, torch.ones(16), source.grid, source.times, source.saliency)
    assert fidelity(flat, merge(flat, torch.zeros(16, dtype=torch.int64), 1, method="mean")).nqe == pytest.approx(1.0, abs=1e-5)


def test_zero_vectors_have_no_cosine() -> None:
    """PP-10: a zero row is 0, not NaN."""
    assert best_cosine(torch.zeros(2, 3), torch.ones(1, 3)).tolist() == [0.0, 0.0]


def test_identity_holds_no_stream() -> None:
    with pytest.raises(PluginError, match="a stream has no end"):
        form(Identity(), lambda tokens, count: torch.zeros(len(tokens), dtype=torch.int64), 64)


def test_identity_refuses_to_drop() -> None:
    with pytest.raises(BudgetError, match="identity keeps all 16"):
        Identity()([tokens_of(1, 4, 4)], [Budget(4)])


@pytest.mark.parametrize("grid", [(1, 16, 16), (8, 4, 4), (1, 1, 40), (5, 6, 3)])
@pytest.mark.parametrize("m", [1, 4, 7, 37, 39])
def test_uniform_keeps_the_published_places(grid: tuple[int, int, int], m: int) -> None:
    """floor((i + 1/2) n / m), in fractions."""
    source = tokens_of(*grid)
    (result,) = Uniform()([source], [Budget(m)])
    places = [math.floor((i + Fraction(1, 2)) * len(source) / m) for i in range(m)]
    assert torch.equal(result.tokens.positions, source.positions[places])


def test_uniform_after_another_method_spaces_what_is_left() -> None:
    (thinned,) = Random(seed=3)([tokens_of(1, 8, 8)], [Budget(20)])
    (result,) = Uniform()([thinned.tokens], [Budget(4)])
    assert torch.equal(result.tokens.positions, thinned.tokens.positions[[2, 7, 12, 17]])


def test_random_seeds_differ_and_repeat() -> None:
    source, budget = tokens_of(1, 16, 16), Budget(26)
    drawn = [Random(seed=seed)([source], [budget])[0].audit.assignment for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**30])
def test_a_seed_of_more_bits_than_there_are_is_refused(seed: int) -> None:
    with pytest.raises(PluginError, match="64 bits"):
        Random(seed=seed)
    assert len(Random(seed=2**64 - 1)([tokens_of(1, 2, 2)], [Budget(2)])[0].tokens) == 2


@pytest.mark.parametrize("amount", [0, -1, 17, 100, True])
def test_impossible_counts(amount: int) -> None:
    """PP-09."""
    with pytest.raises(BudgetError):
        Budget.of(amount, 16)


@pytest.mark.parametrize("amount", [0.0, -1.0, 1.5, 100.0, float("nan"), float("inf")])
def test_impossible_fractions(amount: float) -> None:
    """PP-09."""
    with pytest.raises(BudgetError):
        Budget.of(amount, 16)


def test_fractions_round_half_up_and_keep_one() -> None:
    assert [Budget.of(f, 10).count for f in (0.25, 0.35, 0.01, 1.0)] == [3, 4, 1, 10]


@pytest.mark.parametrize("n", [10, 50, 90, 300])
def test_fractions_are_the_decimals_that_were_written(n: int) -> None:
    """0.29 of 50 is 14.5, and 0.35 of 90 is 31.5: float products stop short of both."""
    for percent in range(1, 101):
        assert Budget.of(percent / 100, n).count == max(1, (percent * n + 50) // 100), percent


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_a_count_of_numpy_is_a_count(kind: type[np.integer[Any]]) -> None:
    """Also in one, which as a share would be all."""
    for count in (1, 2, 100):
        assert Budget.of(kind(count), 100) == Budget(count)
    for wrong in (kind(0), kind(101), np.bool_(True)):
        with pytest.raises(BudgetError):
            Budget.of(wrong, 100)
