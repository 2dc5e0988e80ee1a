"""Which publishers and subscribers find each other, against the tables of ROS 2's documentation on quality of service."""

from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from math import inf

import pytest

from mmsdk.errors import InputError
from mmsdk.vla.ros.qos import CLOCK, COMMANDS, DEFAULT, LATCHED, SENSORS, AnyQos, Qos, check, mismatches, qos_of

# offered, requested, whether they are connected: the documentation's tables, row by row
RELIABILITY = [
    ("best_effort", "best_effort", True),
    ("best_effort", "reliable", False),
    ("reliable", "best_effort", True),
    ("reliable", "reliable", True),
]
DURABILITY = [
    ("volatile", "volatile", True),
    ("volatile", "transient_local", False),
    ("transient_local", "volatile", True),
    ("transient_local", "transient_local", True),
]
DEADLINE = [(inf, inf, True), (inf, 1.0, False), (1.0, inf, True), (1.0, 1.0, True), (1.0, 2.0, True), (2.0, 1.0, False)]
LIVELINESS = [
    ("automatic", "automatic", True),
    ("automatic", "manual_by_topic", False),
    ("manual_by_topic", "automatic", True),
    ("manual_by_topic", "manual_by_topic", True),
]


@pytest.mark.parametrize(
    ("policy", "table"),
    [("reliability", RELIABILITY), ("durability", DURABILITY), ("deadline", DEADLINE), ("liveliness", LIVELINESS), ("lease", DEADLINE)],
)
def test_the_tables_of_the_documentation_hold(policy: str, table: list[tuple[object, object, bool]]) -> None:
    for offered, requested, connected in table:
        told = mismatches(replace(DEFAULT, **{policy: offered}), replace(DEFAULT, **{policy: requested}))
        assert (not told) == connected and len(told) <= 1
        assert connected or policy in told[0]


def test_every_policy_that_does_not_match_is_named() -> None:
    for choice in product(RELIABILITY, DURABILITY, DEADLINE, LIVELINESS):
        offered, requested = Qos(*[row[0] for row in choice[:2]], 5), Qos(*[row[1] for row in choice[:2]], 1)
        offered = replace(offered, deadline=choice[2][0], liveliness=choice[3][0])
        requested = replace(requested, deadline=choice[2][1], liveliness=choice[3][1])
        assert len(mismatches(offered, requested)) == sum(not row[2] for row in choice)


def test_depth_and_lifespan_play_no_part() -> None:
    assert not mismatches(Qos(depth=1, lifespan=0.1), Qos(depth=0, lifespan=9.0))


def test_the_classic_trap_is_told_by_topic() -> None:
    with pytest.raises(
        InputError, match="/camera: the publisher and the subscriber are never connected: reliability: best_effort is offered"
    ):
        check("/camera", SENSORS, DEFAULT)
    check("/camera", SENSORS, SENSORS)
    check("/camera", DEFAULT, SENSORS)
    check("/clock", DEFAULT, CLOCK)
    assert mismatches(COMMANDS, LATCHED) and not mismatches(LATCHED, COMMANDS)


class Policy(Enum):
    """As rclpy's enumerations name them."""

    SYSTEM_DEFAULT = 0
    RELIABLE = 1
    BEST_EFFORT = 2
    VOLATILE = 3
    TRANSIENT_LOCAL = 4
    KEEP_LAST = 5
    KEEP_ALL = 6
    AUTOMATIC = 7
    MANUAL_BY_TOPIC = 8
    BEST_AVAILABLE = 9


@dataclass(frozen=True)
class Lasting:
    nanoseconds: int = 0


@dataclass
class Profile:
    """The attributes of rclpy's QoSProfile."""

    reliability: Policy = Policy.BEST_EFFORT
    durability: Policy = Policy.TRANSIENT_LOCAL
    history: Policy = Policy.KEEP_LAST
    depth: int = 7
    deadline: Lasting = Lasting(50_000_000)
    lifespan: Lasting = Lasting(0)
    liveliness: Policy = Policy.MANUAL_BY_TOPIC
    liveliness_lease_duration: Lasting = Lasting(9_223_372_036_854_775_807)


def test_profiles_of_rclpy_are_read_by_name() -> None:
    assert isinstance(Profile(), AnyQos)
    assert qos_of(Profile()) == Qos("best_effort", "transient_local", 7, 0.05, inf, "manual_by_topic", inf)
    assert qos_of(replace(Profile(), history=Policy.KEEP_ALL, liveliness=Policy.SYSTEM_DEFAULT)).depth == 0
    for field in ("reliability", "durability", "liveliness"):
        with pytest.raises(InputError, match="decided: name the polic"):
            qos_of(replace(Profile(), **{field: Policy.BEST_AVAILABLE}))


def test_durations_of_nothing_are_refused() -> None:
    for wrong in ({"deadline": 0.0}, {"lease": -1.0}, {"lifespan": float("nan")}, {"depth": -1}):
        with pytest.raises(InputError, match="durations are above 0"):
            Qos(**wrong)
