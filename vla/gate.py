"""The gate: whatever is wanted, what reaches the robot keeps to its contract, and can still be brought to rest inside of it.

Each number of an action is one axis (`mmsdk.vla.motion`): of a position the command itself, of a velocity or a step the motion that it
adds up to, corrected by what the robot measures and kept `lag` away from the ends of its range. Where a workspace is declared, the whole
way to rest is checked in it, tool point by tool point. Limits of a rotation act on its numbers, under the name nearest to the last command
(`mmsdk.vla.equivalent`); so near a gimbal lock Euler angles still go the way of their numbers. Where that way leads past numbers that are
no rotation (rot6d, half a turn away), the robot brakes before them: behind them the rotation is another one at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, nan

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import ModelError, SafetyError
from mmsdk.vla.contract import Contract, Feature
from mmsdk.vla.equivalent import in_range, nearest, no_rotation, thin, unwind, whole
from mmsdk.vla.lane import Lane, Measuring, lanes
from mmsdk.vla.motion import Motion
from mmsdk.vla.rotation import from_quaternion

__all__ = ["Forward", "Gate", "Verdict"]

Forward = Callable[[Float[Tensor, "n a"]], Float[Tensor, "n 3"]]
"""Forward kinematics: axis positions, in the action's order, to the tool's position in metres of the robot's base.

NaN stands for what nobody knows: efforts, and velocities and steps that nothing measures.
"""

_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may be sent, and what was changed in what was wanted ("joints[2]: 1.7 became 1.52"); nothing changed, nothing named."""

    command: Float[Tensor, " a"]
    changes: tuple[str, ...] = ()


class Gate:
    """Keeps the last command of every axis and its motion. Nothing passes before `start` has said where the robot stands."""

    def __init__(self, contract: Contract, forward: Forward | None = None) -> None:
        """Raises ModelError for a workspace that cannot be kept, and for actions that are relative to what a policy saw.

        A workspace takes forward kinematics, and these may read only axes whose place is known: neither efforts, nor velocities and steps
        that nothing measures.
        """
        if contract.workspace.bounded and forward is None:
            raise ModelError(f"{contract.name}: a workspace is declared; pass the robot's forward kinematics, without which it is not kept")
        for command in contract.action:
            if command.meaning == "relative":
                raise ModelError(
                    f"{contract.name}: {command.feature.name} is relative to what a policy saw; no robot takes that: convert it"
                )
        self.contract = contract
        self.started = self._commanded = False
        self._period = 1.0 / contract.rate
        self._lanes, self._measuring = lanes(contract), Measuring.of(contract)
        self._turns = [(each.feature, contract.action_columns(each.feature.name)) for each in contract.action if each.turns]
        self._forward = forward if contract.workspace.bounded else None
        self._check_known()
        self._motions = [Motion(0.0)] * len(self._lanes)
        self._before = self._motions
        self._aims = [0.0] * len(self._lanes)
        self._rest: list[float] | None = None

    def start(self, state: Float[Tensor, " p"]) -> None:
        """Begin, or begin again, at rest where the robot is measured.

        A position that was commanded before stays where it differs by less than an axis moves in a tick, so that it does not jump by what
        the robot is still behind; a gripper's stays however far it is, so that what it holds does not drop.
        """
        last = self._positions()
        places = self._measuring(state, last)
        keeps = [self._keeps(*each) for each in zip(self._lanes, places, last, strict=True)]
        for _, columns in self._turns:
            keeps[columns] = [all(keeps[columns])] * len(keeps[columns])
        for index, lane in enumerate(self._lanes):
            self._motions[index] = Motion(last[index] if keeps[index] else places[index] if lane.measured else 0.0)
        self._before, self._rest, self.started = list(self._motions), None, True
        self._aims = self._positions()

    def agree(self, states: Sequence[Float[Tensor, " p"]]) -> bool:
        """Whether states measured one after the other can be of one robot: no number moved faster than its axis can, or than its lag.

        A single damaged measurement must not become the place that a robot is then sent to.
        """
        first = self._measuring(states[0], self._positions())
        places = [self._measuring(state, first) for state in states]
        spread = [max(each) - min(each) for each in zip(*places, strict=True)]
        near = [min(lane.lag, lane.axis.speed * self._period * len(states)) for lane in self._lanes]
        return all(wide <= allowed for wide, allowed, lane in zip(spread, near, self._lanes, strict=True) if lane.measured)

    def measure(self, state: Float[Tensor, " p"]) -> str:
        """Take in a new state; where it lies further than `lag` from what was commanded, say so and take in nothing."""
        places = self._measuring(state, self._positions())
        for lane, place, motion in zip(self._lanes, places, self._motions, strict=True):
            if told := lane.parted(place, motion):
                return told
        self._follow(places)
        return ""

    def hold(self, state: Float[Tensor, " p"]) -> None:
        """The robot really is where `state` measures it, further than `lag` from what was commanded: something blocks or moves it.

        From the next `stop` on it is held there, not pushed on towards the command. Where it is held within `lag` of that place already it
        stays, so that a hold does not creep along with an arm that sags.
        """
        places = self._measuring(state, self._positions())
        self._follow(places)
        rest = places if self._rest is None else self._near(self._rest)
        trios = zip(self._lanes, places, rest, strict=True)
        if self._rest is None or any(lane.kind == "position" and lane.parted(place, Motion(held)) for lane, place, held in trios):
            self._rest = self._resting(state)

    def towards(self, action: Float[Tensor, " a"]) -> Verdict:
        """One tick towards an action.

        Raises SafetyError for a wrong number of numbers, one that is not finite, what is no rotation, and before `start`.
        """
        self._check(action)
        self._unwind()
        wanted = self._near(action.tolist())
        drifts = [(value - aim) / self._period for value, aim in zip(wanted, self._aims, strict=True)]
        pairs = zip(self._lanes, self._motions, wanted, drifts, strict=True)
        told = self._settle([lane.next(motion, value, drift) for lane, motion, value, drift in pairs])
        self._rest, self._aims = None, wanted
        given, sent = self._commands(), self._sent(self._commands())
        each = zip(self._lanes, wanted, given, action.tolist(), sent, strict=True)
        changes = [f"{lane.name}: {was:.4g} became {now:.4g}" for lane, value, went, was, now in each if abs(value - went) > _SAME]
        return Verdict(torch.tensor(sent, dtype=torch.float64), (*told, *changes))

    def stop(self, state: Float[Tensor, " p"] | None = None) -> Verdict:
        """One tick of coming to rest: positions hold, velocities and efforts go to zero.

        Positions hold where `state`, which is to be fresh, measured them when the stop began; without it, where braking ends. Grippers
        always hold where they were sent: at the measured width the fingers would no longer press, and what they hold would drop. Raises
        SafetyError before `start`.
        """
        if not self.started:
            raise SafetyError("there is no measured position to hold yet")
        self._unwind()
        self._rest = self._resting(state) if self._rest is None else self._near(self._rest)
        pairs = zip(self._lanes, self._motions, self._rest, strict=True)
        self._settle([lane.stopping(motion, place) for lane, motion, place in pairs])
        self._aims = self._positions()
        return Verdict(torch.tensor(self._sent(self._commands()), dtype=torch.float64))

    def jerks(self) -> list[float]:
        """The jerk of every axis from the last command but one to the last, in its unit per s^3."""
        pairs = zip(self._before, self._motions, strict=True)
        return [(after.acceleration - before.acceleration) / self._period for before, after in pairs]

    @property
    def resting(self) -> bool:
        """Whether every axis stands still, by what was commanded; an effort does so only at 0, for a constant one still pushes."""
        still = all(not motion.velocity and not motion.acceleration for motion in self._motions)
        return still and not any(motion.position for lane, motion in zip(self._lanes, self._motions, strict=True) if lane.kind == "effort")

    def _check(self, action: Tensor) -> None:
        if not self.started:
            raise SafetyError("nothing is sent before the robot's state has been measured")
        if action.shape[0] != len(self._lanes):
            raise SafetyError(f"an action of {action.shape[0]} numbers for {len(self._lanes)} of {self.contract.name}; none is made up")
        if not bool(action.isfinite().all()):
            raise SafetyError(f"an action that is not finite: {action.tolist()}")
        for feature, columns in self._turns:
            if told := no_rotation(feature, action[columns].tolist()):
                raise SafetyError(f"an action that is no rotation: {told}")

    def _check_known(self) -> None:
        """Ask the kinematics about axes of which some are not known: they may not be read."""
        unknown = [lane.name for lane in self._lanes if not lane.known]
        if self._forward is None or not unknown:
            return
        row = [min(max(0.0, lane.axis.low), lane.axis.high) if lane.known else nan for lane in self._lanes]
        for feature, columns in self._turns:
            row[columns] = from_quaternion(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64), feature.layout).tolist()
        if not bool(self._forward(torch.tensor([row], dtype=torch.float64)).isfinite().all()):
            told = f"the workspace hangs on {', '.join(unknown)}, whose place nobody knows"
            raise ModelError(f"{self.contract.name}: {told}; name the state feature that measures it, or command positions")

    def _keeps(self, lane: Lane, place: float, last: float) -> bool:
        near = min(lane.lag, lane.axis.speed * self._period)
        return self._commanded and lane.kind == "position" and (lane.grips or abs(place - last) <= near < inf)

    def _positions(self) -> list[float]:
        return [motion.position for motion in self._motions]

    def _near(self, values: Sequence[float]) -> list[float]:
        """Values of an action, each rotation under its name nearest to the last command."""
        near, last = list(values), self._positions()
        for feature, columns in self._turns:
            near[columns] = nearest(feature, near[columns], last[columns])
        return near

    def _unwind(self) -> None:
        """Keep every axis-angle away from a whole turn."""
        for feature, columns in self._turns:
            motions = self._motions[columns]
            place, rates = unwind(feature, *_split(motions))
            if place != [motion.position for motion in motions]:
                self._motions = list(self._motions)
                self._motions[columns] = [Motion(*each) for each in zip(place, *rates, strict=True)]
                self._aims[columns] = nearest(feature, self._aims[columns], place)

    def _follow(self, places: Sequence[float]) -> None:
        """Velocities and steps go on from where the robot is measured."""
        pairs = zip(self._lanes, self._motions, places, strict=True)
        self._motions = [
            motion._replace(position=place) if lane.measured and lane.kind in ("velocity", "step") else motion
            for lane, motion, place in pairs
        ]

    def _resting(self, state: Tensor | None) -> list[float]:
        """Where each axis is to stand."""
        ends = [[motion, *lane.axis.braking(motion)][-1].position for lane, motion in zip(self._lanes, self._motions, strict=True)]
        places = ends if state is None else self._measuring(state, self._positions())
        return [
            0.0 if lane.kind == "effort" else place if lane.kind == "position" and not lane.grips else end
            for lane, place, end in zip(self._lanes, places, ends, strict=True)
        ]

    def _settle(self, motions: list[Motion]) -> tuple[str, ...]:
        """Take these motions, or brake where the tool could not stay in its workspace behind them, or would turn by a leap."""
        told: tuple[str, ...] = ()
        if leaping := self._leaping(motions):
            feature, columns = leaping
            told = (f"{feature.name}: the way there leads past numbers that are no rotation",)
            motions = [lane.axis.rest(motion) for lane, motion in zip(self._lanes, self._motions, strict=True)]
            if not any(motion.velocity or motion.acceleration for motion in motions[columns]):
                # the same rotation, from where others can be gone to
                motions[columns] = map(Motion, whole(feature, [motion.position for motion in motions[columns]]))
        elif self._forward is not None and not self._inside(self._forward, motions):
            told = ("the tool would leave its workspace or exceed its speed",)
            motions = [lane.axis.rest(motion) for lane, motion in zip(self._lanes, self._motions, strict=True)]
        self._before, self._motions, self._commanded = self._motions, motions, True
        return told

    def _leaping(self, motions: Sequence[Motion]) -> tuple[Feature, slice] | None:
        """The rotation whose numbers hardly tell one any more, now or until all axes rest; None where all do."""
        for feature, columns in self._turns:
            paths = [[motion, *lane.axis.braking(motion)] for lane, motion in zip(self._lanes[columns], motions[columns], strict=True)]
            rows = ([path[min(k, len(path) - 1)].position for path in paths] for k in range(max(map(len, paths))))
            if any(thin(feature, row) for row in rows):
                return feature, columns
        return None

    def _inside(self, forward: Forward, motions: Sequence[Motion]) -> bool:
        """Whether the tool stays in its box, and below its speed, from now until all axes rest."""
        paths = [[motion, *lane.axis.braking(motion)] for lane, motion in zip(self._lanes, motions, strict=True)]
        longest = max(map(len, paths))
        ways = [
            [now.position] + [path[min(k, len(path) - 1)].position for k in range(longest)] if lane.known else [nan] * (longest + 1)
            for lane, now, path in zip(self._lanes, self._motions, paths, strict=True)
        ]
        points = forward(torch.tensor([self._sent(row) for row in zip(*ways, strict=True)], dtype=torch.float64))
        space = self.contract.workspace
        low, high = points.new_tensor(space.low) - _SAME, points.new_tensor(space.high) + _SAME
        speeds = torch.linalg.vector_norm(points.diff(dim=0), dim=-1) / self._period
        return bool(((points[1:] >= low) & (points[1:] <= high)).all() & (speeds <= space.speed + _SAME).all())

    def _commands(self) -> list[float]:
        return [lane.command(motion) for lane, motion in zip(self._lanes, self._motions, strict=True)]

    def _sent(self, values: Sequence[float]) -> list[float]:
        """Values as the robot takes them: each rotation inside of its range."""
        sent = list(values)
        for feature, columns in self._turns:
            sent[columns] = in_range(feature, sent[columns])
        return sent


def _split(motions: Sequence[Motion]) -> tuple[list[float], list[list[float]]]:
    """Positions, and velocities and accelerations."""
    return [each.position for each in motions], [[each.velocity for each in motions], [each.acceleration for each in motions]]
