"""The clocks of ROS: the machine's date, in which real drivers stamp, and /clock, in which simulators do.

Both are clocks for the control loop, which must go by the same one that its observations are stamped with.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition

from mmsdk.errors import InputError
from mmsdk.vla.ros.protocols import AnyClock
from mmsdk.vla.ros.stamps import SECOND, nanoseconds

__all__ = ["SimTime", "SystemTime"]


@dataclass(frozen=True, slots=True)
class SystemTime:
    """ROS time without a simulation: seconds since 1970, as every driver on this machine stamps; somebody may set it."""

    def now(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Sleep for so long."""
        time.sleep(max(0.0, seconds))


class SimTime:
    """The time that /clock tells (`use_sim_time`): it stands still while the simulation does, and goes back when that is reset.

    `take` may be called from any thread. When time goes back, all of `resets` are called: buffers that are ordered by time must forget.
    """

    def __init__(self, resets: Sequence[Callable[[], None]] = ()) -> None:
        self.jumps = 0
        self._resets = tuple(resets)
        self._now = 0
        self._changed = Condition()
        self._closed: float | None = None

    @property
    def started(self) -> bool:
        """Whether /clock has told the time; until then it is 0."""
        return self._now > 0

    def take(self, message: AnyClock) -> None:
        """The simulation's time is this now. Raises InputError for a stamp that is none; the time then stays."""
        moment = nanoseconds(message.clock)
        if moment < 0:
            raise InputError(f"{moment / SECOND} s is before all time", item="/clock")
        with self._changed:
            back = moment < self._now
            self._now = moment
            self.jumps += back
            self._changed.notify_all()
        if back:
            for reset in self._resets:
                reset()

    def now(self) -> float:
        """Seconds of the simulation; after `close` they go on by the machine's clock."""
        with self._changed:
            since = 0.0 if self._closed is None else time.monotonic() - self._closed
            return self._now / SECOND + since

    def sleep(self, seconds: float) -> None:
        """Return when the simulation has gone on by so many seconds, at once when it goes back or this clock is closed.

        A simulation that is paused is waited for as long as it takes. After `close` it sleeps by the machine's clock: what is left to do,
        as bringing a robot to rest, keeps its pace.
        """
        if seconds <= 0:
            return
        with self._changed:
            if self._closed is None:
                jumps, until = self.jumps, self._now + round(seconds * SECOND)
                self._changed.wait_for(lambda: self._now >= until or self.jumps != jumps or self._closed is not None)
                return
        time.sleep(seconds)

    def close(self) -> None:
        """No more is heard of /clock; whoever sleeps wakes up."""
        with self._changed:
            if self._closed is None:
                self._closed = time.monotonic()
            self._changed.notify_all()
