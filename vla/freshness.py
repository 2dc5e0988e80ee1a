"""Whether what the robot says about itself is of now: damaged, reordered, old and frozen observations are told from good ones.

A robot that has once been stale is trusted again only after some good observations in a row.
"""

from math import inf

import torch

from mmsdk.vla.contract import Contract, Feature
from mmsdk.vla.equivalent import follow
from mmsdk.vla.types import Observation

__all__ = ["Freshness"]

_SLACK = 0.05
_MOVED = 0.01


class Freshness:
    """The newest good observation, and whether it is too old to act on. Times are seconds of the loop's clock."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.newest: Observation | None = None
        self.latched = True
        self._since = -inf
        self._good = 0
        self._seen: dict[str, Observation] = {}

    def fault(self, observation: Observation, now: float) -> str:
        """What is wrong with an observation: damaged, older than the newest one or the episode, or from the future; "" for a good one.

        Out of range is a number of the state further than 5 % outside of its feature's range.
        """
        if observation.stamp.captured > now:
            return f"captured {observation.stamp.captured - now:.3f} s in the future"
        if observation.stamp.captured < self._since <= now:
            return "captured before the episode began"
        # a newest one from the future was stamped before the clock was set back, and says nothing about order
        if self.newest is not None and observation.stamp.captured < self.newest.stamp.captured <= now:
            return "older than what came before it"
        missing = [camera.name for camera in self.contract.cameras if camera.name not in observation.images]
        if missing:
            return f"no picture of {', '.join(missing)}"
        for camera in self.contract.cameras:
            if observation.images[camera.name].size != camera.upright_size:
                height, width = observation.images[camera.name].size
                return f"{camera.name} is {height} x {width} pixels, expected {camera.upright_size}"
        if observation.state.shape[0] != self.contract.state_size:
            return f"a state of {observation.state.shape[0]} numbers, expected {self.contract.state_size}"
        return _damage(self.contract.state, observation.state.tolist())

    def take(self, observation: Observation, now: float) -> None:
        """Make a good observation the newest. One that has come before counts for nothing."""
        if self.newest is not None and observation.stamp.captured == self.newest.stamp.captured:
            return
        for name, image in observation.images.items():
            seen = self._seen.get(name)
            if seen is None or not torch.equal(seen.images[name].pixels, image.pixels):
                self._seen[name] = observation
        self.newest = observation
        self._good = min(self._good + 1, self.contract.timing.recover)
        if self.old(now):
            self._good = 0
        elif self._good == self.contract.timing.recover:
            self.latched = False

    def stale(self, now: float) -> str:
        """Why nothing may be done on what is known, "" if something may. Old once is stale until good observations have come in a row."""
        old = self.old(now)
        if old:
            self.latched, self._good = True, 0
        return old or (f"{self._good} of {self.contract.timing.recover} good observations since it was stale" if self.latched else "")

    def restart(self, now: float) -> None:
        """Forget all that was seen: a new episode begins, and nothing that was captured before counts in it."""
        self.newest, self.latched, self._good, self._since = None, True, 0, now
        self._seen.clear()

    def old(self, now: float) -> str:
        """Which part is older than allowed, or frozen; "" where all are fresh."""
        newest, timing = self.newest, self.contract.timing
        if newest is None:
            return "nothing has been observed"
        for part in ("state", *(camera.name for camera in self.contract.cameras)):
            age = newest.age(part, now)
            if not 0 <= age <= timing.stale:
                return f"{part} is {age:.3f} s old, allowed {timing.stale:g}"
        for name, seen in self._seen.items():
            same = seen.age(name, now)
            if same > timing.frozen and _moved(self.contract.state, seen, newest):
                return f"{name} shows the same picture for {same:.3f} s while the robot moves"
        return ""


def _damage(features: tuple[Feature, ...], state: list[float]) -> str:
    place = 0
    for feature in features:
        for low, high in zip(feature.low, feature.high, strict=True):
            slack = _SLACK * (high - low) if high - low < inf else 0.0
            # NaN fails this comparison, as it should
            if not (low - slack <= state[place] <= high + slack) or abs(state[place]) == inf:
                return f"{feature.name} is {state[place]:.4g}, expected {low:g}..{high:g}"
            place += 1
    return ""


def _moved(features: tuple[Feature, ...], before: Observation, after: Observation) -> bool:
    """Whether the state has changed by more than a hundredth of a range (of 1, where it has none), whatever rotations are called."""
    widths = [high - low for feature in features for low, high in zip(feature.low, feature.high, strict=True)]
    was = before.state.double().tolist()
    now = follow(features, after.state.double().tolist(), was)
    return any(abs(new - old) > _MOVED * (width if width < inf else 1.0) for new, old, width in zip(now, was, widths, strict=True))
