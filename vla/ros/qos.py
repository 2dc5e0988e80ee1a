"""Quality of service: which publisher and which subscriber find each other, and why two do not.

DDS connects a pair only where the subscriber asks for no more than the publisher offers, and says nothing where it does not: a reliable
subscriber of a best-effort camera just never gets a picture. `mismatches` says it.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal, Protocol, runtime_checkable

from mmsdk.errors import InputError

__all__ = ["CLOCK", "COMMANDS", "DEFAULT", "LATCHED", "SENSORS", "AnyQos", "Qos", "check", "mismatches", "qos_of"]

Reliability = Literal["best_effort", "reliable"]
Durability = Literal["volatile", "transient_local"]
Liveliness = Literal["automatic", "manual_by_topic"]

# rmw's infinite duration in nanoseconds; 0 stands for one that was not set, which is infinite too
_FOREVER = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Qos:
    """What a publisher offers or a subscriber asks for; durations in seconds, infinite where nothing is promised.

    `depth` messages are kept (0: all of them). `deadline`: the longest time between two messages. `lifespan`: after which a message is no
    longer delivered. `lease`: within which a publisher shows that it is alive. Depth and lifespan play no part in matching.
    """

    reliability: Reliability = "reliable"
    durability: Durability = "volatile"
    depth: int = 10
    deadline: float = inf
    lifespan: float = inf
    liveliness: Liveliness = "automatic"
    lease: float = inf

    def __post_init__(self) -> None:
        if self.depth < 0 or not all(duration > 0 for duration in (self.deadline, self.lifespan, self.lease)):
            raise InputError(f"{self}: durations are above 0, depth is not below 0", item="qos")


DEFAULT = Qos()
SENSORS = Qos("best_effort", depth=5)
"""rmw_qos_profile_sensor_data: better a lost picture than an old one."""
COMMANDS = Qos(depth=1)
"""Every command arrives, and none but the newest is acted on."""
LATCHED = Qos(durability="transient_local", depth=1)
"""Whoever comes late gets the last message too: descriptions, static transforms."""
CLOCK = Qos("best_effort", depth=1)
"""What rclpy asks for on /clock."""


def mismatches(offered: Qos, requested: Qos) -> tuple[str, ...]:
    """Why a publisher and a subscriber are not connected, policy by policy; nothing where they are."""
    told = []
    if requested.reliability == "reliable" and offered.reliability == "best_effort":
        told.append("reliability: best_effort is offered, reliable is asked for")
    if requested.durability == "transient_local" and offered.durability == "volatile":
        told.append("durability: volatile is offered, transient_local is asked for")
    if offered.deadline > requested.deadline:
        told.append(f"deadline: {offered.deadline:g} s is offered, at most {requested.deadline:g} s is asked for")
    if requested.liveliness == "manual_by_topic" and offered.liveliness == "automatic":
        told.append("liveliness: automatic is offered, manual_by_topic is asked for")
    if offered.lease > requested.lease:
        told.append(f"liveliness lease: {offered.lease:g} s is offered, at most {requested.lease:g} s is asked for")
    return tuple(told)


def check(topic: str, offered: Qos, requested: Qos) -> None:
    """Raises InputError, naming the topic and every policy, for a pair that would never be connected."""
    told = mismatches(offered, requested)
    if told:
        raise InputError(f"the publisher and the subscriber are never connected: {'; '.join(told)}", item=topic)


@runtime_checkable
class _Named(Protocol):
    @property
    def name(self) -> str: ...


@runtime_checkable
class _Lasting(Protocol):
    @property
    def nanoseconds(self) -> int: ...


@runtime_checkable
class AnyQos(Protocol):
    """rclpy's QoSProfile, as `get_publishers_info_by_topic` gives it."""

    @property
    def reliability(self) -> _Named: ...
    @property
    def durability(self) -> _Named: ...
    @property
    def history(self) -> _Named: ...
    @property
    def depth(self) -> int: ...
    @property
    def deadline(self) -> _Lasting: ...
    @property
    def lifespan(self) -> _Lasting: ...
    @property
    def liveliness(self) -> _Named: ...
    @property
    def liveliness_lease_duration(self) -> _Lasting: ...


def qos_of(profile: AnyQos) -> Qos:
    """A profile of rclpy as ours. Raises InputError for policies that are not decided yet (SYSTEM_DEFAULT, BEST_AVAILABLE, UNKNOWN)."""
    reliability, durability = profile.reliability.name.lower(), profile.durability.name.lower()
    liveliness = profile.liveliness.name.lower()
    if reliability not in ("best_effort", "reliable") or durability not in ("volatile", "transient_local"):
        raise InputError(f"{reliability} and {durability} are not decided: name the policies", item="qos")
    # a publisher that nobody has set up is as alive as the machine can tell by itself
    if liveliness not in ("automatic", "manual_by_topic", "system_default"):
        raise InputError(f"a liveliness of {liveliness} is not decided: name the policy", item="qos")
    return Qos(
        "reliable" if reliability == "reliable" else "best_effort",
        "volatile" if durability == "volatile" else "transient_local",
        0 if profile.history.name.lower() == "keep_all" else int(profile.depth),
        _lasting(profile.deadline),
        _lasting(profile.lifespan),
        "manual_by_topic" if liveliness == "manual_by_topic" else "automatic",
        _lasting(profile.liveliness_lease_duration),
    )


def _lasting(duration: _Lasting) -> float:
    return duration.nanoseconds / 1e9 if 0 < duration.nanoseconds < _FOREVER else inf
