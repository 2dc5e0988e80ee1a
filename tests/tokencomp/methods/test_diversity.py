"""DivPrune, CDPruner and P4Q: tokens that differ, against exhaustive references in double precision."""

from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from mmsdk.compress import compression
from mmsdk.errors import InputError, PluginError
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.fake_quant import fake_quantise
from mmsdk.tokencomp.methods.cdpruner import CDPruner
from mmsdk.tokencomp.methods.divprune import DivPrune
from mmsdk.tokencomp.methods.p4q import P4Q
from mmsdk.tokencomp.types import Compressed
from mmsdk.vision.types import VisualTokens

Tokens = Callable[..., VisualTokens]


def cosines(x: Tensor) -> Tensor:
    z = x.double() / x.double().norm(dim=1, keepdim=True)
    return z @ z.T


def kept(result: Compressed) -> list[int]:
    return [i for i, slot in enumerate(result.audit.assignment.tolist()) if slot >= 0]


def most_determinant(kernel: Tensor, m: int) -> list[int]:
    """Greedy by the determinants themselves, one by one; of equal ones the earlier."""
    chosen: list[int] = []
    for _ in range(m):
        left = [i for i in range(len(kernel)) if i not in chosen]
        chosen.append(max(left, key=lambda i: round(float(torch.det(kernel[[*chosen, i]][:, [*chosen, i]])), 9)))
    return sorted(chosen)


def scaled(x: Tensor) -> Tensor:
    return (x - x.min()) / (x.max() - x.min())


@pytest.mark.parametrize(("n", "m"), [(30, 1), (30, 6), (30, 29), (17, 9)])
def test_divprune_takes_the_largest_least_distance(tokens_of: Tokens, n: int, m: int) -> None:
    source = tokens_of((1, 1, n), seed=n)
    distance = (1 - cosines(source.features)).tolist()
    chosen = [max(range(n), key=lambda i: sorted(distance[i])[1])]
    while len(chosen) < m:
        chosen.append(max((i for i in range(n) if i not in chosen), key=lambda i: min(distance[i][c] for c in chosen)))
    (result,) = DivPrune()([source], [Budget(m)])
    assert kept(result) == sorted(chosen)


def test_divprune_takes_a_twin_last(tokens_of: Tokens) -> None:
    source = tokens_of((1, 1, 12), seed=1)
    features = torch.cat([source.features[:11], source.features[4:5]])
    (result,) = DivPrune()([tokens_of((1, 1, 12), seed=1, features=features)], [Budget(11)])
    assert len({4, 11} & set(kept(result))) == 1


@pytest.mark.parametrize("m", [1, 4, 8])
def test_cdpruner_without_a_question_is_the_plain_process(tokens_of: Tokens, m: int) -> None:
    source = tokens_of((1, 4, 5), seed=m, width=24)
    (result,) = CDPruner()([source], [Budget(m)])
    assert kept(result) == most_determinant(cosines(source.features), m)


@pytest.mark.parametrize("sign", ["negative", "positive"])
@pytest.mark.parametrize("m", [3, 9])
def test_cdpruner_weighs_by_the_question(tokens_of: Tokens, sign: str, m: int) -> None:
    source = tokens_of((1, 4, 5), seed=7, width=24)
    query = torch.randn(3, 24, generator=torch.Generator().manual_seed(5))
    near = torch.stack([cosines(torch.stack([x, q]))[0, 1] for x in source.features for q in query]).view(20, 3).mean(dim=1)
    relevance = scaled(-near if sign == "negative" else near)
    (result,) = CDPruner(sign="negative" if sign == "negative" else "positive")([source], [Budget(m)], [query])
    assert kept(result) == most_determinant(relevance[:, None] * cosines(source.features) * relevance, m)
    torch.testing.assert_close(result.audit.scores.double(), relevance, rtol=1e-4, atol=1e-5)


def test_more_tokens_than_dimensions_are_filled_up_from_the_start(tokens_of: Tokens) -> None:
    """Five dimensions are spent after five tokens; the determinant says nothing about the rest."""
    source = tokens_of((1, 5, 8), seed=2, width=5)
    (result,) = CDPruner()([source], [Budget(30)])
    first_five = set(most_determinant(cosines(source.features), 5))
    assert kept(result) == sorted(first_five | set([i for i in range(40) if i not in first_five][:25]))


def reference_p4q(x: Tensor, m: int, query: Tensor | None, weight: float = 0.5) -> list[int]:
    x = x.double()
    norms = x.norm(dim=1)
    saliency = scaled((norms - norms.mean()) / norms.std())
    if query is None:
        quality = saliency ** (1 - weight)
    else:
        near = x @ query.double().mean(dim=0) / (norms * query.double().mean(dim=0).norm())
        quality = scaled(near) ** weight * saliency ** (1 - weight)
    return most_determinant(quality[:, None] * cosines(x) * quality, m)


@pytest.mark.parametrize("asked", [True, False])
def test_p4q_at_16_bits_is_the_selector_without_quantisation(tokens_of: Tokens, asked: bool) -> None:
    source = tokens_of((1, 4, 5), seed=9, width=24)
    query = torch.randn(4, 24, generator=torch.Generator().manual_seed(6)) if asked else None
    (result,) = P4Q(bits=16)([source], [Budget(7)], None if query is None else [query])
    assert kept(result) == reference_p4q(source.features, 7, query)


@pytest.mark.parametrize("scale", ["token", "tensor"])
@pytest.mark.parametrize("bits", [2, 4])
def test_p4q_chooses_by_the_copies_and_keeps_the_originals(tokens_of: Tokens, bits: int, scale: str) -> None:
    source = tokens_of((1, 4, 5), seed=3, width=24)
    before = source.features.clone()
    most = 2 ** (bits - 1) - 1
    rows = source.features.tolist()
    overall = max(abs(v) for row in rows for v in row)
    copies = []
    for row in rows:
        step = (max(abs(v) for v in row) if scale == "token" else overall) / most
        copies.append([step * max(-most, min(most, round(v / step))) for v in row])
    method = P4Q(bits=bits, scale="token" if scale == "token" else "tensor")
    (result,) = method([source], [Budget(6)])
    assert kept(result) == reference_p4q(torch.tensor(copies), 6, None)
    assert torch.equal(result.tokens.features, before[kept(result)]) and torch.equal(source.features, before)


def test_what_p4q_calibrates_on_is_what_it_deploys(tokens_of: Tokens) -> None:
    """The seam of calibration: its record, the fields and the budget, makes the same selector again, whose rows are those of the model's
    inputs; and what statistics are taken of is not what all tokens would give."""
    source, query = tokens_of((1, 4, 5), seed=5, width=24), torch.randn(3, 24, generator=torch.Generator().manual_seed(6))
    record = {"amount": 0.3, **asdict(P4Q(bits=3, scale="tensor", relevance=0.25))}
    amount, *knobs = (str(value) if name == "amount" else f"{name}={value}" for name, value in record.items())
    spec = compression(f"p4q:{','.join((amount, *knobs))}")
    assert spec.steps[0].method == P4Q(bits=3, scale="tensor", relevance=0.25) and spec.steps[0].amount == 0.3
    (selected,) = P4Q(bits=3, scale="tensor", relevance=0.25)([source], [Budget(6)], [query])
    (entering,) = spec.entering([source], [query])
    rows = entering.compressed.tokens.features
    assert torch.equal(rows, selected.tokens.features) and torch.equal(rows, source.features[kept(selected)])
    assert not torch.allclose(torch.cov(rows.T), torch.cov(source.features.T))


def test_fake_quantisation_keeps_zero_and_the_largest_entry() -> None:
    """PP-10."""
    x = torch.tensor([[[0.0, 0.0], [6e4, -3e4], [0.5, 7.0]]], dtype=torch.float16)
    copy = fake_quantise(x, 4)
    assert torch.equal(copy[0, 0], torch.zeros(2)) and float(copy[0, 1, 0]) == pytest.approx(float(x[0, 1, 0]))
    assert copy[0, 2].tolist() == [0.0, 7.0]


@pytest.mark.parametrize("method", [CDPruner(), P4Q()])
def test_a_question_of_another_width_is_named(tokens_of: Tokens, method: CDPruner | P4Q) -> None:
    with pytest.raises(InputError, match=r"query: \(2, 7\) does not fit visual tokens of width 12"):
        method([tokens_of((1, 2, 3))], [Budget(2)], [torch.ones(2, 7)])
    with pytest.raises(InputError, match="at least one embedding"):
        method([tokens_of((1, 2, 3))], [Budget(2)], [torch.ones(0, 12)])
    with pytest.raises(InputError, match="query: 2 visual inputs came with the questions of 1"):
        method([tokens_of((1, 2, 3))] * 2, [Budget(2)] * 2, [torch.ones(2, 12)])


@pytest.mark.parametrize("method", [CDPruner(), CDPruner(sign="positive"), P4Q()])
def test_each_input_of_a_batch_is_chosen_for_its_own_question(tokens_of: Tokens, method: CDPruner | P4Q) -> None:
    """Inputs of one shape, planned for side by side, asked about differently, in questions of different length; and one of another."""
    items = [*[tokens_of((1, 4, 5), seed=1, width=24)] * 3, tokens_of((1, 3, 3), seed=2, width=24)]
    generator = torch.Generator().manual_seed(3)
    query = [torch.randn(length, 24, generator=generator) for length in (1, 4, 9, 2)]
    budgets = [Budget(6), Budget(6), Budget(6), Budget(4)]
    together = method(items, budgets, query)
    for item, budget, question, result in zip(items, budgets, query, together, strict=True):
        (alone,) = method([item], [budget], [question])
        assert kept(alone) == kept(result)
        torch.testing.assert_close(alone.audit.scores, result.audit.scores)
    assert len({tuple(kept(result)) for result in together[:3]}) > 1


@pytest.mark.parametrize("bits", [1, 17])
def test_p4q_refuses_bits_that_mean_nothing(bits: int) -> None:
    with pytest.raises(PluginError, match="bits"):
        P4Q(bits=bits)
