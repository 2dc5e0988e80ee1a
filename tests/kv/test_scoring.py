"""Exactly as many as the budget says: against sorting by hand, with ties, padding, and rows and heads of their own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmsdk.errors import BudgetError
from mmsdk.kv.scoring import all_but_one, amount_of, chosen, kept, latest_first


def by_hand(scores: Tensor, valid: Tensor, quota: Tensor, most: int) -> list[list[list[int]]]:
    """The best of every head, of equal ones the earlier, in order behind -1."""
    out = []
    for row, real, count in zip(scores.tolist(), valid.tolist(), quota.tolist(), strict=True):
        heads = []
        for head, there, number in zip(row, real, count, strict=True):
            best = sorted((i for i in range(len(head)) if there[i]), key=lambda i, head=head: (-head[i], i))[:number]  # type: ignore[misc]
            heads.append([-1] * (most - len(best)) + sorted(best))
        out.append(heads)
    return out


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 2), st.integers(1, 9), st.booleans())
def test_what_stays_is_what_sorting_says(seed: int, b: int, q: int, t: int, whole: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 4, (b, q, t), generator=generator)
    valid = torch.arange(t) >= torch.randint(0, t, (b, q, 1), generator=generator)
    quota = torch.minimum(torch.randint(1, t + 1, (b, q), generator=generator), valid.sum(-1))
    most = int(quota.max())
    expected = by_hand(scores, valid, quota, most)
    assert chosen(scores if whole else scores.float(), valid, quota, most).tolist() == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 2), st.integers(2, 9), st.booleans())
def test_letting_one_go_is_keeping_the_others(seed: int, b: int, q: int, t: int, whole: bool) -> None:
    scores = torch.randint(0, 4, (b, q, t), generator=torch.Generator().manual_seed(seed))
    scores = scores if whole else scores.float() * 1e-3 + torch.where(scores == 3, torch.inf, 0)
    everything = torch.ones(b, q, t, dtype=torch.bool)
    assert torch.equal(all_but_one(scores), chosen(scores, everything, torch.full((b, q), t - 1), t - 1))


def test_noise_decides_nothing() -> None:
    scores = torch.tensor([[[5.0, 3.0, 3.0 - 1e-7, 3.0 + 1e-7]]]) * 1e-4
    assert chosen(scores, scores > 0, torch.tensor([[2]]), 2).tolist() == [[[0, 1]]]
    assert all_but_one(scores).tolist() == [[[0, 1, 2]]]


def test_the_latest_come_first_and_the_newest_of_them_before_all() -> None:
    order = torch.tensor([[[-1, 0, 1, 2, 3]]])
    scores = latest_first(torch.tensor([[[9.0, 7.0, 1.0, 0.0, 0.0]]]), order, (order >= 2).long())
    everything = order >= 0
    assert [chosen(scores, everything, torch.tensor([[count]]), count).tolist()[0][0] for count in (1, 2, 3)] == [[4], [3, 4], [1, 3, 4]]


def test_amounts_are_counts_or_shares() -> None:
    assert [amount_of(text, "x") for text in ("64", "0.25", "1.0")] == [64, 0.25, 1.0]
    assert [kept(0.25, n) for n in (1, 10, 14)] == [1, 3, 4] and kept(64, 10) == 64
    for text in ("0", "-3", "0.0", "1.5", "nan", "some"):
        with pytest.raises(BudgetError):
            amount_of(text, "h2o:x")
