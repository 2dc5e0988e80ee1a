"""The emergency stop: once tripped it stays so until somebody resets it, and no reset is taken right after."""

from mmsdk.errors import SafetyError

__all__ = ["EmergencyStop"]


class EmergencyStop:
    """Latched. `trip` may come from anywhere, at any time; `reset` is for people."""

    def __init__(self, cooldown: float) -> None:
        """`cooldown`: the seconds after the last trip during which a reset is refused."""
        self.cooldown = cooldown
        self._tripped: tuple[str, float] | None = None

    @property
    def reason(self) -> str:
        """Why it is tripped, "" where it is not."""
        return self._tripped[0] if self._tripped else ""

    def trip(self, reason: str, now: float) -> None:
        """Stop the robot. Of several reasons the first stays; the cooldown counts from the last."""
        self._tripped = self.reason or reason or "tripped", now

    def reset(self, now: float) -> None:
        """Allow motion again. Raises SafetyError during the cooldown, and where the clock has gone back behind the trip."""
        if self._tripped is None:
            return
        since = now - self._tripped[1]
        if not since >= self.cooldown:
            raise SafetyError(f"the emergency stop ({self._tripped[0]}) is {since:.3f} s old; no reset before {self.cooldown:g} s")
        self._tripped = None
