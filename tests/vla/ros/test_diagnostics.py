"""What /diagnostics is told about a loop, its parts and its lifecycle."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from mmsdk.errors import InputError
from mmsdk.vla.accounting import Account, LoopReport
from mmsdk.vla.ros.diagnostics import Heartbeat, Tolerance, array_of, lifecycle_status, loop_status, status, worst
from mmsdk.vla.ros.lifecycle import State
from mmsdk.vla.ros.messages import DiagnosticArray, Level, Message
from mmsdk.vla.ros.stamps import SECOND


def report(**more: object) -> LoopReport:
    account = Account(ticks=1000, requests=100)
    account.latency.extend([0.05] * 99 + [0.2])
    return replace(account.report(), **more)


@pytest.mark.parametrize(
    ("more", "level", "told"),
    [
        ({}, Level.OK, "runs"),
        ({"stale_rate": 0.01, "held_rate": 0.05}, Level.OK, "runs"),
        ({"stale_rate": 0.02}, Level.WARN, "stale 2.0% of ticks"),
        ({"held_rate": 0.2, "changed_rate": 0.5}, Level.WARN, "held 20.0% of ticks; changed by the gate 50.0% of ticks"),
        ({"held_rate": 0.3}, Level.ERROR, "held 30.0% of ticks"),
        ({"failed": 2, "deadline_misses": 1}, Level.WARN, "1 deadline misses; 2 policy errors"),
        ({"ticks": 0}, Level.STALE, "has not ticked"),
    ],
)
def test_a_loop_is_as_well_as_its_ticks(more: dict[str, object], level: Level, told: str) -> None:
    found = loop_status(report(**more))
    assert (found.level, found.message) == (level, told)


def test_latencies_and_reasons_are_listed(heard: Callable[[Message], object]) -> None:
    found = loop_status(report(reasons={"held: stale": 7}), hardware="arm 3")
    message = heard(array_of([found, lifecycle_status(State.ACTIVE)], 5 * SECOND + 1))
    values = {pair.key: pair.value for pair in message.status[0].values}
    assert (values["ticks"], values["latency p50 (ms)"], values["held: stale"]) == ("1000", "50", "7")
    assert float(values["latency p99 (ms)"]) > 50 and message.status[0].hardware_id == "arm 3"
    assert (message.header.stamp.sec, message.header.stamp.nanosec) == (5, 1)
    assert isinstance(array_of([found], SECOND), DiagnosticArray)


def test_heartbeats_fade() -> None:
    heart = Heartbeat("camera", 0.5)
    assert heart.status(0.0).level == Level.STALE
    heart.beat(10.0)
    levels = [heart.status(10.0 + silent).level for silent in (0.0, 0.5, 0.6, 1.5, 1.6)]
    assert levels == [Level.OK, Level.OK, Level.WARN, Level.WARN, Level.STALE]
    assert "silent for 0.600 s" in heart.status(10.6).message
    # the clock has gone back: when it last beat is no longer known
    assert heart.status(3.0).level == Level.STALE
    heart.beat(3.0)
    assert heart.status(3.1).level == Level.OK
    with pytest.raises(InputError, match="camera: a period"):
        Heartbeat("camera", 0.0)


def test_the_whole_is_the_worst_of_its_parts() -> None:
    def whole(*levels: Level) -> Level:
        return worst([status("part", level, "", {}) for level in levels])

    assert whole(Level.OK, Level.WARN, Level.OK) == Level.WARN and whole(Level.OK) == Level.OK
    assert whole(Level.STALE, Level.STALE) == whole() == Level.STALE
    assert whole(Level.STALE, Level.OK) == Level.ERROR


def test_only_an_active_node_is_ok() -> None:
    levels = [lifecycle_status(state).level for state in State]
    assert levels == [Level.WARN, Level.WARN, Level.OK, Level.ERROR]
    for wrong in ({"stale": -0.1}, {"wrong": 0.5}, {"held": float("nan")}):
        with pytest.raises(InputError, match="tolerance: "):
            Tolerance(**wrong)
