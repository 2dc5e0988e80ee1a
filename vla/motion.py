"""Motion of one axis within limits: the next step towards a target after which the axis can still come to rest inside of them.

A state is safe if braking from it, under the limits on acceleration and jerk, stays within position and speed. A step is taken only if the
state behind it is safe; where the wanted one is not, it is drawn towards the braking step, which is safe because the state before it was
(an invariant, by induction). Time is discrete, as a controller's is: v' = v + a' dt, q' = q + v' dt, |a' - a| <= jerk dt.
Plain floats: an arm has few axes, and a tensor operation costs more than all of this.
"""

from dataclasses import dataclass
from math import copysign, floor, inf, isinf, sqrt
from typing import NamedTuple

__all__ = ["Axis", "Motion"]

_ROUNDING = 1e-9
_NOTHING = 1e-12
_HALVINGS = 6
_LONGEST = 4096


class Motion(NamedTuple):
    """Position, velocity and acceleration of an axis at a tick."""

    position: float
    velocity: float = 0.0
    acceleration: float = 0.0


@dataclass(frozen=True, slots=True)
class Axis:
    """The limits of one axis, in its unit, per s, s^2 and s^3, and `period`, the seconds between two commands."""

    period: float
    low: float = -inf
    high: float = inf
    speed: float = inf
    acceleration: float = inf
    jerk: float = inf

    def braking(self, start: Motion, aim: float = 0.0, ticks: int = _LONGEST) -> list[Motion]:
        """The motions of the following ticks until the velocity is `aim`: as fast as the limits allow, ending without a jolt.

        The difference in velocity that a ramp of the acceleration down to zero makes is jerk dt^2 n (n + 1) / 2 for n ticks: from it
        follows the acceleration that ends exactly there. More than `ticks` are not given: the last motion is then not there yet.
        """
        dt, ramp = self.period, self.jerk * self.period
        position, velocity, acceleration = start
        path: list[Motion] = []
        while (velocity != aim or acceleration) and len(path) < ticks:
            wanted = abs(velocity - aim) / dt
            # further away than floats reach, the limits alone say how fast
            if not isinf(ramp) and not isinf(8 * wanted / ramp):
                steps = floor((sqrt(1 + 8 * wanted / ramp) - 1) / 2)
                wanted = (wanted + ramp * steps * (steps + 1) / 2) / (steps + 1)
            wanted = copysign(min(wanted, self.acceleration), aim - velocity)
            acceleration = min(max(wanted, acceleration - ramp), acceleration + ramp)
            velocity += acceleration * dt
            # what rounding leaves over is nothing
            velocity = aim if abs(velocity - aim) < _NOTHING else velocity
            acceleration = 0.0 if velocity == aim and abs(acceleration) < _NOTHING else acceleration
            position += velocity * dt
            path.append(Motion(position, velocity, acceleration))
        return path

    def rest(self, start: Motion) -> Motion:
        """One tick of the stop; the very same motion once at rest."""
        path = self.braking(start)
        return path[0] if path else start

    def towards(self, start: Motion, target: float, drift: float = 0.0) -> Motion:
        """One tick towards a position that moves at `drift` a second: there at once where the limits allow, else nearer.

        It is met at once if the speed at which it is met differs from its own by no more than a tick makes good, so that it is not
        overshot. Otherwise the step is the largest after which the axis can stop at it.
        """
        stop = self.braking(start)
        low, high, speed = self._bounds(start, stop)
        velocity = (target - start.position) / self.period
        exact = Motion(target, velocity, (velocity - start.velocity) / self.period)
        abrupt = abs(velocity - drift) > self.acceleration * self.period
        if not abrupt and self._reachable(start, exact) and self._safe(exact, (low, high, speed)):
            return exact
        positions = [start.position, *(motion.position for motion in stop)]
        low, high = max(low, min(target, *positions)), min(high, max(target, *positions))
        return self._nearest(start, stop, velocity, (low, high, speed))

    def at(self, start: Motion, velocity: float) -> Motion:
        """One tick towards a velocity: at once where the limits allow, else as near as they do."""
        stop = self.braking(start)
        return self._nearest(start, stop, velocity, self._bounds(start, stop))

    def _bounds(self, start: Motion, stop: list[Motion]) -> tuple[float, float, float]:
        """What a step must keep to; an axis that stands outside, or cannot stop inside, may not go further out than its stop does."""
        positions = [start.position, *(motion.position for motion in stop)]
        fastest = max(abs(motion.velocity) for motion in (start, *stop))
        return min(self.low, *positions), max(self.high, *positions), max(self.speed, fastest)

    def _reachable(self, start: Motion, end: Motion) -> bool:
        jolt = abs(end.acceleration - start.acceleration) / self.period
        return abs(end.velocity) <= self.speed and abs(end.acceleration) <= self.acceleration and jolt <= self.jerk

    def _safe(self, motion: Motion, bounds: tuple[float, float, float]) -> bool:
        path = [motion, *self.braking(motion)]
        low, high, speed = bounds[0] - _ROUNDING, bounds[1] + _ROUNDING, bounds[2] + _ROUNDING
        resting = not path[-1].velocity and not path[-1].acceleration
        return resting and all(low <= step.position <= high and -speed <= step.velocity <= speed for step in path)

    def _nearest(self, start: Motion, stop: list[Motion], velocity: float, bounds: tuple[float, float, float]) -> Motion:
        """The step towards a velocity whose acceleration is nearest to the wanted one and safe; the braking step always is."""
        best = stop[0] if stop else start
        aim = min(max(velocity, -self.speed), self.speed)
        wanted = next(iter(self.braking(start, aim, 1)), _stepped(start, 0.0, self.period))
        if self._safe(wanted, bounds):
            return wanted
        safe, unsafe = best.acceleration, wanted.acceleration
        for _ in range(_HALVINGS):
            middle = (safe + unsafe) / 2
            step = _stepped(start, middle, self.period)
            if self._safe(step, bounds):
                best, safe = step, middle
            else:
                unsafe = middle
        return best


def _stepped(start: Motion, acceleration: float, dt: float) -> Motion:
    velocity = start.velocity + acceleration * dt
    return Motion(start.position + velocity * dt, velocity, acceleration)
