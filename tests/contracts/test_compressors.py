"""What every compressor promises, over every file in tokencomp/methods: a new method is tested by being there."""

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from mmsdk import plugins
from mmsdk.errors import BudgetError
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.plan import reading_key
from mmsdk.tokencomp.types import Compressed, Compressor
from mmsdk.vision.types import VisualTokens

PACKAGE = "mmsdk.tokencomp.methods"
METHODS = plugins.available(PACKAGE)
WIDTH = 8


def tokens_of(grid: tuple[int, int, int], seed: int, dtype: torch.dtype = torch.float32) -> VisualTokens:
    frames, rows, columns = grid
    n = frames * rows * columns
    generator = torch.Generator().manual_seed(seed)
    return VisualTokens(
        features=torch.randn(n, WIDTH, generator=generator).to(dtype),
        positions=torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns)).reshape(n, 3),
        weight=torch.full((n,), 4.0 if frames > 1 else 1.0),
        grid=grid,
        times=torch.arange(frames) * 0.5,
        saliency=torch.rand(n, generator=generator),
        keys=torch.randn(n, 4, generator=generator).to(dtype),
    )


def method_of(name: str) -> Compressor:
    method = plugins.load(PACKAGE, name)
    assert isinstance(method, Compressor)
    return method


def budget_for(name: str, n: int, share: float) -> Budget:
    # identity keeps everything by definition, and says so when asked for less (its own test is below)
    return Budget(n) if name == "identity" else Budget.of(share, n)


def same(a: Compressed, b: Compressed) -> bool:
    tensors = ("features", "positions", "weight", "saliency")
    return torch.equal(a.audit.assignment, b.audit.assignment) and all(
        torch.equal(getattr(a.tokens, name), getattr(b.tokens, name)) for name in tensors
    )


grids = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
shares = st.floats(0.01, 1.0)


def test_the_first_methods_are_found() -> None:
    assert {"identity", "random", "uniform"} <= set(METHODS)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=40, deadline=None)
@given(grid=grids, share=shares, seed=st.integers(0, 9))
def test_one_input(name: str, grid: tuple[int, int, int], share: float, seed: int) -> None:
    """Exact budget, reading order, positions, weight accounted for by the assignment, and features of the right kind."""
    source = tokens_of(grid, seed)
    budget = budget_for(name, len(source), share)
    (result,) = method_of(name)([source], [budget])
    kept, assignment = result.tokens, result.audit.assignment

    assert len(kept) == budget.count
    assert kept.positions.shape == (budget.count, 3) and kept.weight.shape == (budget.count,)
    assert kept.saliency.shape == (budget.count,) and kept.keys is not None and kept.keys.shape == (budget.count, 4)
    assert kept.grid == source.grid and torch.equal(kept.times, source.times)
    assert torch.isfinite(kept.features).all()

    keys = reading_key(kept.positions, grid)
    assert (keys.diff() >= 0).all()
    assert (kept.positions >= 0).all() and (kept.positions < torch.tensor(grid)).all()

    assert assignment.shape == (len(source),) and assignment.dtype == torch.int64
    assert result.audit.scores.shape == (len(source),) and result.audit.method.startswith(name)
    used = assignment[assignment >= 0]
    assert torch.equal(used.unique(), torch.arange(budget.count))
    expected = torch.zeros(budget.count).index_add_(0, used, source.weight[assignment >= 0])
    torch.testing.assert_close(kept.weight, expected)
    if (torch.bincount(used) == 1).all():
        # nothing was merged: the survivors are source tokens, untouched
        order = assignment.argsort(stable=True)[-budget.count :]
        assert torch.equal(kept.features, source.features[order]) and torch.equal(kept.positions, source.positions[order])


@pytest.mark.parametrize("name", METHODS)
def test_batch_equals_one_by_one_and_repeats(name: str) -> None:
    method = method_of(name)
    batch = [tokens_of((1, 4, 6), 0), tokens_of((3, 5, 2), 1), tokens_of((1, 1, 1), 2), tokens_of((1, 6, 4), 3)]
    budgets = [budget_for(name, len(item), 0.3) for item in batch]
    together = method(batch, budgets)
    alone = [method([item], [budget])[0] for item, budget in zip(batch, budgets, strict=True)]
    assert len(together) == len(batch)
    assert all(same(a, b) for a, b in zip(together, alone, strict=True))
    assert all(same(a, b) for a, b in zip(together, method(batch, budgets), strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_input_is_not_touched(name: str) -> None:
    source = tokens_of((2, 5, 5), 7)
    before = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    copies = {key: value.clone() for key, value in before.items() if isinstance(value, torch.Tensor)}
    method_of(name)([source], [budget_for(name, len(source), 0.4)])
    assert all(torch.equal(getattr(source, key), value) for key, value in copies.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_dtype_and_device_are_kept(name: str, dtype: torch.dtype) -> None:
    source = tokens_of((1, 6, 6), 3, dtype)
    (result,) = method_of(name)([source], [budget_for(name, len(source), 0.5)])
    assert result.tokens.features.dtype == dtype and result.tokens.features.device == source.features.device
    assert result.tokens.positions.dtype == source.positions.dtype and result.tokens.weight.dtype == source.weight.dtype


@pytest.mark.parametrize("name", METHODS)
def test_full_budget_keeps_every_token(name: str) -> None:
    """PP-09: nothing pruned equals the baseline bit for bit."""
    source = tokens_of((2, 4, 4), 5)
    (result,) = method_of(name)([source], [Budget(len(source))])
    assert torch.equal(result.tokens.features, source.features) and torch.equal(result.tokens.positions, source.positions)


@pytest.mark.parametrize("name", METHODS)
def test_zero_and_huge_features_stay_finite(name: str) -> None:
    """PP-10: zero rows and entries of 6e4 in half precision."""
    source = tokens_of((1, 6, 6), 3, torch.float16)
    features = source.features.clone()
    features[::3] = 0.0
    features[1::3] = 6e4
    (result,) = method_of(name)([dataclasses.replace(source, features=features)], [budget_for(name, 36, 0.4)])
    assert torch.isfinite(result.tokens.features).all() and torch.isfinite(result.audit.scores).all()


@pytest.mark.parametrize("name", METHODS)
def test_ties_and_repetition(name: str) -> None:
    """PP-12: tokens that are all alike give the same survivors every time."""
    source = tokens_of((1, 5, 5), 3)
    flat = dataclasses.replace(source, features=torch.ones(25, WIDTH), saliency=torch.ones(25), keys=torch.ones(25, 4))
    budget = budget_for(name, 25, 0.4)
    first = method_of(name)([flat], [budget])[0]
    assert all(same(first, method_of(name)([flat], [budget])[0]) for _ in range(3))


@pytest.mark.parametrize("name", METHODS)
def test_impossible_budgets_are_refused(name: str) -> None:
    source = tokens_of((1, 3, 3), 0)
    with pytest.raises(BudgetError, match="item 0"):
        method_of(name)([source], [Budget(10)])
    with pytest.raises(BudgetError, match="one budget per input"):
        method_of(name)([source, source], [Budget(9)])
