"""FastV, PyramidDrop and DeFT: their published counts and places. What a decoder makes of them is tested with the decoder."""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmsdk.errors import InputError, ModelError, PluginError
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.methods.deft import DeFT
from mmsdk.tokencomp.methods.fastv import FastV
from mmsdk.tokencomp.methods.pyramiddrop import PyramidDrop
from mmsdk.vision.types import VisualTokens

Tokens = Callable[..., VisualTokens]


def test_fastv_cuts_once_after_its_layer_and_keeps_positions() -> None:
    assert FastV().layers(30) == (2,) and FastV(layer=3).layers(4) == (3,) and FastV().positions == "keep"
    assert FastV().counts(576, Budget.of(0.5, 576)) == (288,)
    with pytest.raises(ModelError, match="a decoder of 3 layers allows 1 to 2"):
        FastV(layer=3).layers(3)


def test_pyramiddrop_has_the_published_stages_and_shares() -> None:
    assert PyramidDrop().layers(32) == (8, 16, 24) and PyramidDrop().positions == "compact"
    assert PyramidDrop().counts(576, Budget.of(0.125, 576)) == (288, 144, 72)
    assert PyramidDrop(stages=2).counts(576, Budget(100)) == (100,)
    assert PyramidDrop().counts(5, Budget(5)) == (5, 5, 5) and PyramidDrop().counts(1000, Budget(1)) == (100, 10, 1)
    with pytest.raises(PluginError, match="at least 2"):
        PyramidDrop(stages=1)


@pytest.mark.parametrize(("n", "share", "kept", "entering"), [(576, 0.1, 58, 162), (1000, 0.2, 200, 360), (256, 0.2, 51, 92)])
def test_deft_lets_in_the_published_counts(tokens_of: Tokens, n: int, share: float, kept: int, entering: int) -> None:
    source, budget = tokens_of((1, 1, n)), Budget.of(share, n)
    (entered,) = DeFT().enter([source], [budget])
    assert budget.count == kept and len(entered.tokens) == entering and DeFT().counts(entering, budget) == (kept,)
    best = sorted(range(n), key=lambda i: -float(source.saliency[i]))[:entering]
    assert torch.equal((entered.audit.assignment >= 0).nonzero()[:, 0], torch.tensor(sorted(best)))
    assert torch.equal(entered.audit.scores, source.saliency)


@given(n=st.integers(1, 2000), kept=st.integers(1, 2000), tenths=st.integers(0, 100))
def test_no_float_lifts_the_reserve(n: int, kept: int, tenths: int) -> None:
    """The ceiling of the exact product, whatever the decimal share is as a float."""
    kept = min(n, kept)
    item = VisualTokens(
        torch.zeros(n, 1), torch.zeros(n, 3, dtype=torch.long), torch.ones(n), (1, 1, n), torch.zeros(1), torch.arange(n).float()
    )
    (entered,) = DeFT(reserve=tenths / 100).enter([item], [Budget(kept)])
    assert len(entered.tokens) == min(n, kept + math.ceil(Fraction(tenths, 100) * (n - kept)))


def test_deft_without_reserve_is_the_encoders_choice_and_with_all_of_it_the_texts(tokens_of: Tokens) -> None:
    source = tokens_of((1, 6, 6))
    (alone,), (all_,) = (DeFT(reserve=reserve).enter([source], [Budget(9)]) for reserve in (0.0, 1.0))
    assert len(alone.tokens) == 9 and len(all_.tokens) == 36
    assert DeFT().layers(36) == (18,) and DeFT().layers(30) == (15,) and DeFT().layers(5) == (3,) and DeFT().positions == "keep"


def test_deft_says_what_is_missing_or_impossible(tokens_of: Tokens) -> None:
    source = tokens_of((1, 3, 3))
    with pytest.raises(InputError, match=r"^item 2 \(index 1, saliency\)"):
        DeFT().enter([source, replace(source, saliency=torch.empty(0))], [Budget(3), Budget(3)])
    with pytest.raises(PluginError, match=r"1\.5"):
        DeFT(reserve=1.5)
    with pytest.raises(PluginError, match="share"):
        DeFT(at=1.0)
