"""`trajectory_msgs/JointTrajectory` both ways: actions as points, and points as a joint trajectory controller takes them or refuses them.

The rules are ros2_controllers' joint_trajectory_controller's: a stamp of zero starts at once, a trajectory that has ended is refused, times
rise strictly, joints may come in any order but must all be there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vla.contract import Control
from mmsdk.vla.ros.messages import Header, JointTrajectory, JointTrajectoryPoint
from mmsdk.vla.ros.protocols import AnyJointTrajectory, AnyJointTrajectoryPoint, Numbers
from mmsdk.vla.ros.stamps import SECOND, duration_of, nanoseconds

__all__ = ["Targets", "joint_trajectory", "read_trajectory"]


@dataclass(frozen=True, slots=True)
class Targets:
    """What a trajectory asks of some joints: n times in seconds after `begins` (nanoseconds of ROS time), and n rows of values."""

    begins: int
    times: Float[Tensor, " n"]
    values: Float[Tensor, "n a"]

    def at(self, now: int) -> Float[Tensor, " a"]:
        """What is asked at a moment: between two points in a straight line, before the first the first, after the last the last."""
        moment = (now - self.begins) / SECOND
        after = int((self.times < moment).sum())
        if after in (0, len(self.times)):
            return self.values[min(after, len(self.times) - 1)]
        start, end = self.times[after - 1], self.times[after]
        return torch.lerp(self.values[after - 1], self.values[after], (moment - start) / (end - start))


def joint_trajectory(
    joints: Sequence[str], actions: Float[Tensor, "h a"], control: Control, period: float, header: Header = Header()
) -> JointTrajectory:
    """h actions as h points, the first one `period` seconds after the beginning: rad or m, their speeds, or N m or N, by `control`.

    Raises InputError for as many numbers as there are not joints, names that are there twice, no actions, and what is not finite.
    """
    if len(set(joints)) != len(joints) or actions.shape[1] != len(joints):
        told = f"{actions.shape[1]} numbers an action for {len(joints)} joints ({', '.join(joints)})"
        raise InputError(f"{told}, expected one each and each joint once; none is made up", item="trajectory")
    if not len(actions) or not bool(actions.isfinite().all()):
        raise InputError(f"{len(actions)} actions, {int((~actions.isfinite()).sum())} numbers not finite", item="trajectory")
    if not (isfinite(period) and round(period * SECOND) > 0):
        raise InputError(f"a period of {period} s, expected at least a nanosecond", item="trajectory")
    points = [_point(row, control, (step + 1) * period) for step, row in enumerate(actions.tolist())]
    return JointTrajectory(header, tuple(joints), tuple(points))


def read_trajectory(message: AnyJointTrajectory, joints: Sequence[str], now: int, control: Control = "position") -> Targets:
    """What a trajectory asks of `joints`, in their order; `now` in nanoseconds of ROS time.

    Raises InputError, as the controller refuses: for joints that are not these, missing or doubled, no points, arrays of another length
    than the names, what is not finite, times that do not rise strictly, and an end that is in the past.
    """
    names = list(message.joint_names)
    if sorted(names) != sorted(joints):
        raise InputError(f"joints {', '.join(names[:32]) or 'none'}, expected each of {', '.join(joints)} once", item="trajectory")
    if not len(message.points):
        raise InputError("has no points", item="trajectory")
    rows = torch.tensor([_values(point, control, len(names), place) for place, point in enumerate(message.points)], dtype=torch.float64)
    if not bool(rows.isfinite().all()):
        raise InputError(f"point {int((~rows.isfinite()).any(1).nonzero()[0])} is not finite", item="trajectory")
    times = [nanoseconds(point.time_from_start) for point in message.points]
    if times[0] < 0 or any(later <= earlier for earlier, later in pairwise(times)):
        raise InputError("time_from_start does not rise strictly from point to point", item="trajectory")
    stamp = nanoseconds(message.header.stamp)
    begins = stamp or now
    if stamp and begins + times[-1] < now:
        raise InputError(f"ended {(now - begins - times[-1]) / SECOND:.3f} s ago", item="trajectory")
    columns = [names.index(name) for name in joints]
    return Targets(begins, torch.tensor(times, dtype=torch.float64) / SECOND, rows[:, columns])


def _point(row: Sequence[float], control: Control, moment: float) -> JointTrajectoryPoint:
    values, time_from_start = tuple(row), duration_of(moment)
    match control:
        case "position":
            return JointTrajectoryPoint(positions=values, time_from_start=time_from_start)
        case "velocity":
            return JointTrajectoryPoint(velocities=values, time_from_start=time_from_start)
        case "effort":
            return JointTrajectoryPoint(effort=values, time_from_start=time_from_start)


def _values(point: AnyJointTrajectoryPoint, control: Control, count: int, place: int) -> list[float]:
    arrays: dict[str, Numbers] = {
        "position": point.positions,
        "velocity": point.velocities,
        "acceleration": point.accelerations,
        "effort": point.effort,
    }
    for field, numbers in arrays.items():
        if len(numbers) != count and (len(numbers) or field == control):
            raise InputError(f"point {place} has {len(numbers)} numbers of {field} for {count} joints", item="trajectory")
    return [float(value) for value in arrays[control]]
