"""The time that a loop goes by, injected: the machine's own, or a simulated one that passes only when somebody sleeps."""

import time
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["Clock", "SimulatedClock", "SystemClock"]


@runtime_checkable
class Clock(Protocol):
    """Seconds since some moment, and a way to let them pass."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None:
        """Return after this many seconds; at once for zero or less."""
        ...


@dataclass(frozen=True, slots=True)
class SystemClock:
    """The machine's monotonic clock, which no change of the date moves."""

    def now(self) -> float:
        """Seconds since the machine started, or thereabouts."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for so long."""
        time.sleep(max(0.0, seconds))


@dataclass(slots=True)
class SimulatedClock:
    """A clock for simulations: `passed` is the time that really went by in them, `offset` what the clock's reading is wrong by."""

    passed: float = 0.0
    offset: float = 0.0

    def now(self) -> float:
        """The reading."""
        return self.passed + self.offset

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.passed += max(0.0, seconds)

    def jump(self, seconds: float) -> None:
        """Set the clock forward or back, while no time passes."""
        self.offset += seconds
