"""Bits by reverse water-filling against the definition."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmsdk.kv.policies.rdkv import LEVELS, allocate, spread


def drawn(n: int, seed: int, scale: float = 3.0) -> Tensor:
    return (torch.randn(2, n, generator=torch.Generator().manual_seed(seed)) * scale).exp()


def bits(worth: Tensor, budget: int, real: Tensor | None = None) -> Tensor:
    budgets = torch.full(worth.shape[:-1], budget)
    return allocate(worth, torch.ones_like(worth, dtype=torch.bool) if real is None else real, budgets)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.floats(0, 1), st.integers(0, 1000))
def test_the_budget_is_met_within_a_step_and_worth_more_is_never_fewer_bits(n: int, share: float, seed: int) -> None:
    worth, budget = drawn(n, seed), int(share * 16 * n)
    found = bits(worth, budget)
    assert set(found.flatten().tolist()) <= set(LEVELS)
    assert (found.sum(-1) <= budget).all()
    # what is left is smaller than the next step of some entry
    assert (found.sum(-1) > budget - 8).all() or (found == 16).all()
    assert (found.gather(1, worth.argsort(1)).diff(dim=1) >= 0).all()


def test_a_budget_for_everything_is_sixteen_bits_everywhere_and_none_drops_all() -> None:
    worth = drawn(9, 0)
    worth[0, 0] = 0
    assert (bits(worth, 9 * 16) == 16).all() and (bits(worth, 10**6) == 16).all()
    assert (bits(worth, 0) == 0).all()


def test_entries_that_are_not_real_have_no_bits_and_take_none_from_the_others() -> None:
    worth, real = drawn(12, 1), torch.arange(12) < 8
    found = bits(worth, 60, real.expand(2, -1))
    assert (found[:, 8:] == 0).all() and torch.equal(found[:, :8], bits(worth[:, :8], 60))


def test_levels_that_are_exact_are_those_of_the_formula() -> None:
    """Worths a power of 4 apart: with theta = 1 the bits are whole levels, and nothing is rounded."""
    worth = torch.tensor([[4.0**power for power in (0, 2, 4, 8, 16, 2)]])
    assert bits(worth, 32).tolist() == [[0, 2, 4, 8, 16, 2]]


@pytest.mark.parametrize("budget", [40, 100, 200])
def test_no_single_exchange_of_steps_would_lower_the_distortion(budget: int) -> None:
    worth = drawn(20, 5)[0]
    found = bits(worth[None], budget)[0]
    steps = dict(pairwise(LEVELS))
    back = {high: low for low, high in steps.items()}
    loss = lambda w, b: float(w) * math.pow(4.0, -b)  # noqa: E731
    slack = budget - int(found.sum())
    for i, up in enumerate(found.tolist()):
        for j, down in enumerate(found.tolist()):
            if i == j or up not in steps or down not in back or steps[up] - up > down - back[down] + slack:
                continue
            # a step up as wide as the step down, bit for bit, never gains more than it loses
            if steps[up] - up == down - back[down]:
                gained = loss(worth[i], up) - loss(worth[i], steps[up])
                lost = loss(worth[j], back[down]) - loss(worth[j], down)
                assert gained <= lost * (1 + 1e-6)


def test_spread_is_the_variance_of_key_and_value_together() -> None:
    keys, values = torch.tensor([1.0, 3.0]), torch.tensor([5.0, 5.0])
    assert spread(keys, values).item() == 1
