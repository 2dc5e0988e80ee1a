"""What every compressor promises, over every file in tokencomp/methods: a new method is tested by being there, as its protocol tells."""

import copy
import dataclasses
from typing import get_args

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from mmsdk import plugins
from mmsdk.compress import named
from mmsdk.errors import BudgetError, ModelError
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.plan import reading_key
from mmsdk.tokencomp.types import Compressed, Compressor, Side, Thinner
from mmsdk.vision.prune import Pruner, Pruning
from mmsdk.vision.shorten import Inside, Shortener
from mmsdk.vision.types import VisualTokens
from mmsdk.vision.vit import ViT, ViTConfig

PACKAGE = "mmsdk.tokencomp.methods"
ALL = {name: plugins.load(PACKAGE, name) for name in plugins.available(PACKAGE)}
METHODS = [name for name, method in ALL.items() if isinstance(method, Compressor)]
PRUNERS = [name for name, method in ALL.items() if isinstance(method, Pruner)]
SHORTENERS = [name for name, method in ALL.items() if isinstance(method, Shortener)]
THINNERS = [name for name, method in ALL.items() if isinstance(method, Thinner)]
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
    assert {"tome"} <= set(SHORTENERS) and {"dora"} <= set(PRUNERS) and {"deft", "fastv", "pyramiddrop"} <= set(THINNERS)


def test_every_method_belongs_to_one_stage_and_goes_by_its_files_name() -> None:
    assert sorted([*METHODS, *SHORTENERS, *PRUNERS, *THINNERS]) == sorted(ALL)
    for name, method in ALL.items():
        assert isinstance(method, Compressor | Shortener | Pruner | Thinner) and named(method) == name


@pytest.mark.parametrize("name", METHODS)
def test_a_method_asks_only_behind_the_projector_and_then_listens(name: str) -> None:
    """Where the question has vectors of the tokens' space. Two questions that point opposite ways are answered by different scores."""
    method, source = method_of(name), tokens_of((2, 5, 5), 7)
    assert method.side in get_args(Side) and (method.side == "behind" or not method.asks)
    question = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))
    budget = budget_for(name, len(source), 0.4)
    one, other = (method([source], [budget], [asked])[0] for asked in (question, -question))
    assert torch.equal(one.audit.scores, other.audit.scores) != method.asks


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
    if name == "braco":
        # a coder, whose tokens are each made of all patches, weighs them evenly
        expected = torch.full((budget.count,), float(source.weight.sum()) / budget.count)
    torch.testing.assert_close(kept.weight, expected)
    if (torch.bincount(used) == 1).all():
        # nothing was merged: the survivors are source tokens, untouched
        order = assignment.argsort(stable=True)[-budget.count :]
        assert torch.equal(kept.features, source.features[order]) and torch.equal(kept.positions, source.positions[order])


@pytest.mark.parametrize("grid", [(1, 3, 4), (3, 2, 2), (1, 1, 2)])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "identity"])
def test_counts_are_met_from_one_token_to_all(name: str, grid: tuple[int, int, int]) -> None:
    source = tokens_of(grid, 3)
    for count in range(1, len(source) + 1):
        (result,) = method_of(name)([source], [Budget(count)])
        assert len(result.tokens) == count == len(result.audit.assignment[result.audit.assignment >= 0].unique())


@pytest.mark.parametrize("name", METHODS)
def test_deep_features_follow_the_same_plan(name: str) -> None:
    """PP-11: the number of each token as its deep feature, at two layers: what is left of them is told by the assignment alone."""
    source = tokens_of((2, 5, 5), 7)
    number = torch.arange(50.0)[:, None].expand(-1, 3)
    budget = budget_for(name, 50, 0.3)
    (result,) = method_of(name)([dataclasses.replace(source, deep=(number, -number))], [budget])
    assignment, weight = result.audit.assignment, source.weight
    for j in range(budget.count):
        mine = assignment == j
        expected = (number[mine, 0] * weight[mine]).sum() / weight[mine].sum()
        for part, sign in zip(result.tokens.deep, (1, -1), strict=True):
            torch.testing.assert_close(part[j], sign * expected.expand(3))


@pytest.mark.parametrize("name", METHODS)
def test_batch_equals_one_by_one_and_repeats(name: str) -> None:
    """Grids that differ, and inputs of one shape, which methods plan for side by side: equal budgets, and one that differs."""
    method = method_of(name)
    grids = [(1, 4, 6), (3, 5, 2), (1, 1, 1), (1, 6, 4), (3, 5, 2), (1, 4, 6), (3, 5, 2), (1, 4, 6)]
    batch = [tokens_of(grid, seed) for seed, grid in enumerate(grids)]
    shares = [0.3] * 6 + [0.6, 0.5]
    budgets = [budget_for(name, len(item), share) for item, share in zip(batch, shares, strict=True)]
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


# Attention to each of many tokens: small numbers, of which many are the same.
LEVELS = torch.tensor([0.2, 0.9, 0.5, 0.9, 0.2])[torch.arange(25) % 5] * 1e-3
FAINT = 2.0**-7


def ranking_alike(source: VisualTokens, saliency: torch.Tensor) -> VisualTokens:
    return dataclasses.replace(source, features=torch.ones_like(source.features), saliency=saliency)


@pytest.mark.parametrize("name", METHODS)
def test_ties_alone_and_beside_others(name: str) -> None:
    """PP-12: another order of adding moves attention by its last bits; whoever was equal stays equal, alone and in a batch."""
    source, method = tokens_of((1, 5, 5), 3), method_of(name)
    plain = ranking_alike(source, LEVELS)
    noise = 1e-7 * torch.randn(25, generator=torch.Generator().manual_seed(1)).sign()
    moved, other = ranking_alike(source, LEVELS * (1 + noise)), tokens_of((1, 5, 5), 4)
    for share in (0.2, 0.4, 0.7):
        budget = budget_for(name, 25, share)
        (alone,), together = method([plain], [budget]), method([other, moved, plain], [budget] * 3)
        assert same(alone, together[2]) and torch.equal(alone.audit.assignment, together[1].audit.assignment)


@pytest.mark.parametrize("name", METHODS)
def test_attention_is_ranked_on_its_own_scale(name: str) -> None:
    """Of ten thousand tokens each is attended to a hundredth as much as of a hundred: what is chosen is the same, ties included."""
    source, method = tokens_of((1, 5, 5), 3), method_of(name)
    for saliency in (1e-3 * source.saliency, LEVELS):
        budget = budget_for(name, 25, 0.4)
        (one,), (other,) = (method([dataclasses.replace(source, saliency=scale * saliency)], [budget]) for scale in (1.0, FAINT))
        assert torch.equal(one.audit.assignment, other.audit.assignment)


@pytest.mark.parametrize("name", METHODS)
def test_impossible_budgets_are_refused(name: str) -> None:
    source = tokens_of((1, 3, 3), 0)
    with pytest.raises(BudgetError, match=r"^item 1 \(index 0\)"):
        method_of(name)([source], [Budget(10)])
    with pytest.raises(BudgetError, match="one budget per input"):
        method_of(name)([source, source], [Budget(9)])


def shortener_of(name: str) -> Shortener:
    method = ALL[name]
    assert isinstance(method, Shortener)
    return method


@pytest.mark.parametrize("name", SHORTENERS)
@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 600), share=shares, depth=st.integers(1, 24))
def test_a_shortener_plans_a_descent_to_the_budget_or_refuses(name: str, n: int, share: float, depth: int) -> None:
    count = Budget.of(share, n).count
    try:
        plan = shortener_of(name).plan(n, count, depth)
    except BudgetError:
        assert count < n / 2
        return
    assert len(plan) == depth and plan[-1] == count
    assert all(before >= after >= 1 for before, after in zip((n, *plan), plan, strict=False))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", SHORTENERS)
def test_a_shortener_gives_every_token_a_place_and_uses_every_place(name: str, first: int) -> None:
    """PP-10, PP-12 too: half-precision extremes and equal keys are no trouble, and the answer is the same every time and alone."""
    method, n, count = shortener_of(name), 17, 11
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(3, 2, first + n, 8, generator=generator).half()
    key[1] = 1.0
    key[2, :, ::2] = 0.0
    key[2, :, 1::2] = 6e4
    inside = Inside(torch.zeros(3, first + n, 16).half(), key, key, torch.ones(3, first + n), first)
    target = method.join(inside, count)
    assert target.dtype == torch.int64 and torch.equal(target[:, :first], torch.arange(first).expand(3, -1))
    assert all(torch.equal(row.unique(), torch.arange(first + count)) for row in target)
    assert torch.equal(target, method.join(inside, count))
    for row in range(3):
        one = slice(row, row + 1)
        alone = Inside(inside.hidden[one], key[one], key[one], inside.size[one], first)
        assert torch.equal(method.join(alone, count)[0], target[row])


@pytest.fixture(scope="module")
def default_vit() -> ViT:
    """The default encoder's transformer, untrained."""
    torch.manual_seed(0)
    return ViT(ViTConfig()).eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PRUNERS)
def test_a_pruner_meets_budgets_exactly_and_accounts_for_every_patch(name: str, dtype: torch.dtype, default_vit: ViT) -> None:
    """Adaptive, it stays below; everything kept is the plain transformer bit for bit; rows are as alone, and the same again."""
    method, vit = ALL[name], default_vit if dtype == torch.float32 else copy.deepcopy(default_vit).to(dtype)
    assert isinstance(method, Pruner)
    pixels = torch.randn(3, 3, 56, 56, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.1, 1, 10])[:, None, None, None]
    for most, exact in ((16, False), (5, False), (9, True), (1, True), (16, True)):
        out = vit(pixels.to(dtype), shortening=Pruning(method, most, exact))
        assert all(n == most if exact else 1 <= n <= most for n in out.groups.lengths) and out.tokens.dtype == dtype
        for row, n in enumerate(out.groups.lengths):
            owner = out.groups.owner[row]
            assert owner[owner >= 0].tolist() == list(range(1, n + 1)) and out.tokens[row].isfinite().all()
            alone = vit(pixels[row : row + 1].to(dtype), shortening=Pruning(method, most, exact))
            assert torch.equal(alone.groups.owner[0], owner)
        assert torch.equal(vit(pixels.to(dtype), shortening=Pruning(method, most, exact)).tokens, out.tokens)
    assert torch.equal(out.tokens, vit(pixels.to(dtype)).tokens)


def thinner_of(name: str) -> Thinner:
    method = ALL[name]
    assert isinstance(method, Thinner)
    return method


@pytest.mark.parametrize("name", THINNERS)
@settings(max_examples=40, deadline=None)
@given(grid=grids, share=shares, seed=st.integers(0, 9))
def test_a_thinner_lets_in_enough_and_ends_at_the_budget(name: str, grid: tuple[int, int, int], share: float, seed: int) -> None:
    method, source = thinner_of(name), tokens_of(grid, seed)
    budget = Budget.of(share, len(source))
    (entered,) = method.enter([source], [budget])
    alive = entered.audit.assignment >= 0
    assert budget.count <= len(entered.tokens) <= len(source) and int(alive.sum()) == len(entered.tokens)
    assert torch.equal(entered.tokens.features, source.features[alive]) and torch.equal(entered.tokens.positions, source.positions[alive])
    assert entered.audit.method in (name, "identity")
    counts = method.counts(len(entered.tokens), budget)
    assert len(counts) == len(method.layers(32)) and counts[-1] == budget.count
    assert all(before >= after for before, after in zip((len(entered.tokens), *counts), counts, strict=False))
    assert same(entered, method.enter([tokens_of((1, 3, 3), 1), source], [Budget(4), budget])[1])
    if budget.count == len(source):
        assert torch.equal(entered.tokens.features, source.features) and set(counts) == {len(source)}


@pytest.mark.parametrize("name", THINNERS)
def test_ties_of_those_that_enter(name: str) -> None:
    """PP-12: as above; and of equals the earlier ones enter."""
    method, source = thinner_of(name), tokens_of((1, 5, 5), 3)
    for share in (0.2, 0.4, 0.7):
        budget = Budget.of(share, 25)
        plain, small, moved = (
            dataclasses.replace(source, saliency=saliency) for saliency in (LEVELS, FAINT * LEVELS, LEVELS + 1e-10 * source.saliency)
        )
        entered = [method.enter([one], [budget])[0].audit.assignment >= 0 for one in (plain, small, moved)]
        assert torch.equal(entered[0], entered[1]) and torch.equal(entered[0], entered[2])
        assert all(bool((entered[0][level == LEVELS].int().diff() <= 0).all()) for level in LEVELS.unique())
        drawn, faint = (dataclasses.replace(source, saliency=scale * 1e-3 * source.saliency) for scale in (1.0, FAINT))
        assert torch.equal(*(method.enter([one], [budget])[0].audit.assignment for one in (drawn, faint)))


@pytest.mark.parametrize("name", THINNERS)
def test_a_thinner_cuts_between_layers_and_says_where_there_are_too_few(name: str) -> None:
    method = thinner_of(name)
    for depth in range(4, 40):
        layers = method.layers(depth)
        assert list(layers) == sorted(set(layers)) and layers[0] > 0 and layers[-1] < depth
    with pytest.raises(ModelError, match="decoder of 1"):
        method.layers(1)


@pytest.mark.parametrize("name", THINNERS)
def test_impossible_budgets_are_refused_by_thinners(name: str) -> None:
    source = tokens_of((1, 3, 3), 0)
    with pytest.raises(BudgetError, match=r"^item 1 \(index 0\)"):
        thinner_of(name).enter([source], [Budget(10)])
    with pytest.raises(BudgetError, match="one budget per input"):
        thinner_of(name).enter([source, source], [Budget(9)])
