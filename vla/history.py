"""The last observations of an episode, for policies that look back; where there are too few, the first stands for those before it."""

from dataclasses import dataclass, field

from mmsdk.errors import InputError
from mmsdk.vla.types import Observation

__all__ = ["History"]


@dataclass(slots=True)
class History:
    """Always exactly `length` observations, oldest first (diffusion policies: 2)."""

    length: int
    _kept: list[Observation] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InputError(f"a history of {self.length} observations, expected at least 1", item="history")

    def reset(self) -> None:
        """Forget them: a new episode begins."""
        self._kept.clear()

    def __call__(self, observation: Observation) -> list[Observation]:
        """The history with this observation as its newest. One of another episode begins a new history."""
        if self._kept and self._kept[-1].stamp.episode != observation.stamp.episode:
            self.reset()
        self._kept = [*self._kept, observation][-self.length :]
        return [self._kept[0]] * (self.length - len(self._kept)) + self._kept
