"""Chunks as they are consumed: published weights, nothing lost, nothing executed twice. VR-09, VR-10, VR-11, VR-13."""

from dataclasses import replace
from math import exp

import pytest
import torch

from mmsdk.errors import InputError
from mmsdk.vla.envs.planar_arm import planar_contract
from mmsdk.vla.history import History
from mmsdk.vla.latency import Delay, percentiles
from mmsdk.vla.plan import RecedingHorizon, TemporalEnsemble, averaging
from mmsdk.vla.types import Observation, Stamp

BOTH = torch.tensor([True])


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_the_ensemble_has_the_published_weights() -> None:
    """Values 0, 1, 2, 3, oldest first: 1.487500 at decay .01."""
    plan = TemporalEnsemble(BOTH)
    for value in range(4):
        assert plan.merge(torch.full((8, 1), float(value)), 0)
    action = plan.pop()
    assert action is not None and float(action) == pytest.approx(1.4875, abs=1e-6)


def test_the_ensemble_agrees_with_a_slow_sum_over_all_chunks() -> None:
    generator, decay = torch.Generator().manual_seed(0), 0.3
    plan, chunks = TemporalEnsemble(BOTH, decay), []
    for tick in range(30):
        if tick % 2 == 0:
            chunks.append((tick, torch.rand(7, 1, generator=generator, dtype=torch.float64)))
            plan.merge(chunks[-1][1], 0)
        speaking = [float(chunk[tick - begun]) for begun, chunk in chunks if tick - begun < len(chunk)]
        weights = [exp(-decay * i) for i in range(len(speaking))]
        action = plan.pop()
        assert action is not None
        assert float(action) == pytest.approx(sum(w * a for w, a in zip(weights, speaking, strict=True)) / sum(weights))


def test_what_cannot_be_averaged_is_the_newest() -> None:
    plan = TemporalEnsemble(torch.tensor([True, False]))
    plan.merge(torch.tensor([[0.0, 1.0]]), 0)
    plan.merge(torch.tensor([[1.0, -1.0]]), 0)
    action = plan.pop()
    assert action is not None and 0.4 < float(action[0]) < 0.5 and float(action[1]) == -1.0
    assert averaging(planar_contract("position")).tolist() == [True] * 3


def test_the_newest_chunk_takes_over_without_what_is_past() -> None:
    plan = RecedingHorizon(BOTH)
    plan.merge(column(0, 1, 2, 3), 0)
    assert float(plan.pop()) == 0
    plan.merge(column(10, 11, 12, 13, 14), 2)
    assert plan.pending().flatten().tolist() == [12, 13, 14]


def test_a_blend_mixes_what_both_speak_of() -> None:
    plan = RecedingHorizon(BOTH, blend=0.7, horizon=3)
    plan.merge(column(0, 0), 0)
    plan.merge(column(1, 1, 1, 1), 0)
    torch.testing.assert_close(plan.pending(), column(0.7, 0.7, 1.0))
    with pytest.raises(InputError, match="blend"):
        RecedingHorizon(BOTH, blend=0.0)
    for decay in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="decay"):
            TemporalEnsemble(BOTH, decay=decay)


@pytest.mark.parametrize("plan", [RecedingHorizon(BOTH), TemporalEnsemble(BOTH)])
def test_vr_11_a_chunk_that_is_past_leaves_the_old_tail(plan: RecedingHorizon | TemporalEnsemble) -> None:
    plan.merge(column(1, 2, 3), 0)
    assert not plan.merge(column(7, 8), 2) and plan.pending().flatten().tolist() == [1, 2, 3]
    assert not plan.merge(column(7, 8), 9) and plan.pending().flatten().tolist() == [1, 2, 3]
    plan.clear()
    assert plan.pop() is None and plan.pending().shape == (0, 1)


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_vr_09_a_seam_of_half_a_radian_is_spread_by_the_ensemble(decay: float) -> None:
    """Ten chunks at 0, then ten at .5, one a tick at 20 Hz: each step stays under 1.5 rad/s."""
    plan, last, steps = TemporalEnsemble(BOTH, decay), 0.0, []
    for tick in range(24):
        plan.merge(torch.full((10, 1), 0.0 if tick < 12 else 0.5), 0)
        action = plan.pop()
        assert action is not None
        steps.append(abs(float(action) - last))
        last = float(action)
    assert max(steps) * 20 < 1.5 and last == pytest.approx(0.5)


def test_vr_10_a_cold_start_is_not_paid_for_ever_after() -> None:
    """5 s, then 60 ms at 30 Hz: while nothing could be executed nothing was consumed, and old answers leave the window."""
    delay = Delay(window=10)
    assert delay.estimate == 0
    delay.add(150)
    for _ in range(10):
        delay.add(2)
    assert delay.estimate <= 3
    with pytest.raises(InputError):
        Delay(window=0)


def test_percentiles_are_numpys() -> None:
    told = percentiles([float(value) for value in range(101)])
    assert (told.count, told.p50, told.p95, told.p99, told.largest) == (101, 50, 95, 99, 100)
    assert percentiles([]).p99 == 0


def test_vr_13_a_history_repeats_its_first_observation() -> None:
    history = History(2)
    first = Observation({}, torch.zeros(1), "", Stamp(0.0))
    second = replace(first, stamp=Stamp(1.0))
    assert history(first) == [first, first]
    assert [entry.stamp.captured for entry in history(second)] == [0.0, 1.0]
    other = replace(first, stamp=Stamp(2.0, episode=1))
    assert [entry.stamp.captured for entry in history(other)] == [2.0, 2.0]
