"""Targets as they are written, before any model is there."""

import math

import jaxtyping
import pytest
import torch

from mmsdk.compress import Step, compression
from mmsdk.errors import BudgetError
from mmsdk.target import Target
from mmsdk.tokencomp.methods.random import Random
from mmsdk.vision.types import VisualTokens


@pytest.mark.parametrize(
    ("text", "ms"),
    [("auto@prefill<80ms", 80.0), ("auto@prefill<0.5s", 500.0), ("auto@prefill < 12.5 ms", 12.5), ("auto@prefill<1e2ms", 100.0)],
)
def test_targets_in_milliseconds_and_seconds(text: str, ms: float) -> None:
    assert Target.parse(text) == Target(ms)
    assert compression(f"random:{text},seed=3").steps == (Step(Random(seed=3), Target(ms)),)


@pytest.mark.parametrize(
    "amount",
    [
        "auto",
        "auto@",
        "auto@prefill",
        "auto@prefill<",
        "auto@prefill<80",
        "auto@prefill<ms",
        "auto@prefill<80min",
        "auto@prefill>80ms",
        "auto@prefill<=80ms",
        "auto@decode<80ms",
        "auto@80ms",
        "autoprefill<80ms",
        "auto@prefill<0ms",
        "auto@prefill<-5ms",
        "auto@prefill<nanms",
        "auto@prefill<1e999ms",
        "auto@prefill<8O ms",
    ],
)
def test_malformed_targets_say_how_one_is_written(amount: str) -> None:
    with pytest.raises(BudgetError, match="auto@prefill<80ms"):
        compression(f"random:{amount}")


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf, None, "80", 10**400, 10**5000, True], ids=lambda ms: f"{type(ms)}")
def test_a_time_that_cannot_be(ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # without the check of types at every call, as users run it
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(BudgetError, match="finite time above 0"):
        Target(ms)


def test_only_one_step_can_be_fitted() -> None:
    with pytest.raises(BudgetError, match="one step"):
        compression(["random:auto@prefill<80ms", "uniform:auto@prefill<80ms"])


def test_without_a_pipeline_a_target_is_no_number() -> None:
    tokens = VisualTokens(torch.ones(4, 2), torch.zeros(4, 3, dtype=torch.int64), torch.ones(4), (1, 2, 2), torch.zeros(1), torch.empty(0))
    with pytest.raises(BudgetError, match="pipeline"):
        compression("random:auto@prefill<80ms")([tokens])
