"""ROS stamps as whole nanoseconds, which compare exactly, and as the seconds that the control loop counts in."""

from math import isfinite

from mmsdk.errors import InputError
from mmsdk.vla.ros.messages import Duration, Time
from mmsdk.vla.ros.protocols import AnyTime

__all__ = ["SECOND", "duration_of", "nanoseconds", "seconds", "stamped", "time_of"]

SECOND = 1_000_000_000
_LATEST = 2**31


def nanoseconds(stamp: AnyTime) -> int:
    """A Time or Duration in nanoseconds. Raises InputError where its parts are out of ROS's ranges (nanosec below one second)."""
    if not 0 <= stamp.nanosec < SECOND or not -_LATEST <= stamp.sec < _LATEST:
        raise InputError(f"sec {stamp.sec}, nanosec {stamp.nanosec}: expected an int32 and 0 to 999,999,999", item="stamp")
    return int(stamp.sec) * SECOND + int(stamp.nanosec)


def stamped(stamp: AnyTime, item: str) -> int:
    """The nanoseconds of a message that says when it was measured. Raises InputError for a stamp of zero: nothing is assumed instead."""
    measured = nanoseconds(stamp)
    if measured <= 0:
        raise InputError("is not stamped; let its driver fill in header.stamp", item=item)
    return measured


def seconds(stamp: AnyTime) -> float:
    """A Time or Duration in seconds; of today's dates exact to a quarter of a microsecond."""
    return nanoseconds(stamp) / SECOND


def time_of(moment: int) -> Time:
    """Nanoseconds as a Time. Raises InputError where they do not fit."""
    sec, nanosec = divmod(moment, SECOND)
    if not -_LATEST <= sec < _LATEST:
        raise InputError(f"{moment} ns do not fit into a stamp", item="stamp")
    return Time(sec, nanosec)


def duration_of(length: float) -> Duration:
    """Seconds as a Duration, to the nearest nanosecond. Raises InputError where they do not fit."""
    if not isfinite(length) or not -_LATEST <= length < _LATEST:
        raise InputError(f"{length} s do not fit into a duration", item="duration")
    return Duration(*divmod(round(length * SECOND), SECOND))
