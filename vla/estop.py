"""The emergency stop: once tripped it stays so until somebody resets it, and no reset is taken right after."""

from threading import RLock

from mmsdk.errors import SafetyError

__all__ = ["EmergencyStop"]


class EmergencyStop:
    """Latched. `trip` may come from anywhere, at any time; `reset` is for people."""

    def __init__(self, cooldown: float) -> None:
        """`cooldown`: the seconds after the last trip during which a reset is refused."""
        self.cooldown = cooldown
        self._tripped: tuple[str, float] | None = None
        self._reset: tuple[str, float] | None = None
        # re-entrant: a signal's handler may trip while its own thread is in here
        self._lock = RLock()

    @property
    def reason(self) -> str:
        """Why it is tripped, "" where it is not."""
        with self._lock:
            tripped = self._tripped
            return "" if tripped is None or tripped is self._reset else tripped[0]

    def trip(self, reason: str, now: float) -> None:
        """Stop the robot. Of several reasons the first stays; the cooldown counts from the last."""
        with self._lock:
            self._tripped = self.reason or reason or "tripped", now

    def reset(self, now: float) -> None:
        """Allow motion again. Raises SafetyError during the cooldown, and where the clock has gone back behind the trip.

        `now` is when somebody asked for it: a trip from after that, on the way here, is not reset.
        """
        with self._lock:
            tripped = self._tripped
            if tripped is None or tripped is self._reset:
                return
            since = now - tripped[1]
            if not since >= self.cooldown:
                raise SafetyError(f"the emergency stop ({tripped[0]}) is {since:.3f} s old; no reset before {self.cooldown:g} s")
            # only the trip that was judged: one from a handler, since then, is another
            self._reset = tripped
