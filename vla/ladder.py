"""Degradation under load: late answers take work away, rung by rung, down to standing still; punctual ones give it back."""

from dataclasses import dataclass, field

from mmsdk.errors import InputError
from mmsdk.vla.types import Effort

__all__ = ["Ladder"]


@dataclass(slots=True)
class Ladder:
    """Full work, without refining, re-using the slow memory, fewer flow steps, hold: `patience` punctual answers lead one rung up."""

    patience: int = 5
    effort: Effort = field(default=Effort.FULL, init=False)
    _punctual: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise InputError(f"a patience of {self.patience} answers, expected at least 1", item="ladder")

    @property
    def asked(self) -> Effort:
        """What to ask of the policy: while the robot holds, the least work, to see whether it is punctual again."""
        return max(self.effort, Effort.FEWER_STEPS)

    def late(self) -> None:
        """An answer was late, or of no use: one rung down."""
        self.effort, self._punctual = Effort(max(self.effort - 1, Effort.HOLD)), 0

    def punctual(self) -> None:
        """An answer came in time."""
        self._punctual += 1
        # one good answer ends a hold: the policy is there again
        if self._punctual >= self.patience or self.effort == Effort.HOLD:
            self.effort, self._punctual = Effort(min(self.effort + 1, Effort.FULL)), 0

    def reset(self) -> None:
        """Back to full work."""
        self.effort, self._punctual = Effort.FULL, 0
