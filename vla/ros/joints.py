"""`sensor_msgs/JointState` as numbers in a declared order, from messages that name their joints in any order and hold some of them.

An arm and its gripper often have one publisher each on the same topic; every joint keeps its own newest value and time.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from mmsdk.errors import InputError
from mmsdk.vla.ros.protocols import AnyJointState, Numbers
from mmsdk.vla.ros.stamps import stamped

__all__ = ["Joints", "Measured", "Reads", "joint_values"]

Reads = Literal["position", "velocity", "effort"]
_READS: tuple[Reads, ...] = ("position", "velocity", "effort")


@dataclass(frozen=True, slots=True)
class Measured:
    """The value of one joint, and the nanosecond of ROS time at which it was measured."""

    value: float
    captured: int


def joint_values(message: AnyJointState, reads: Reads = "position") -> dict[str, float]:
    """What a message says of its joints by name: rad or m, their speeds, or N m or N.

    Raises InputError for a name that is there twice, arrays that are neither empty nor as long as the names, a message without what is
    to be read, and what is not finite.
    """
    names = list(message.name)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"{', '.join(twice[:8])} stand there twice", item="joint state")
    arrays: dict[Reads, Numbers] = {"position": message.position, "velocity": message.velocity, "effort": message.effort}
    for field in _READS:
        if len(arrays[field]) not in (0, len(names)):
            raise InputError(f"{len(arrays[field])} numbers in {field} for {len(names)} joints", item="joint state")
    if names and not len(arrays[reads]):
        raise InputError(f"tells no {reads} of {', '.join(names[:8])}", item="joint state")
    values = {name: float(value) for name, value in zip(names, arrays[reads], strict=True)}
    broken = [name for name, value in values.items() if not isfinite(value)]
    if broken:
        raise InputError(f"the {reads} of {', '.join(broken[:8])} is not finite", item="joint state")
    return values


class Joints:
    """The newest of each of some joints, put together from any number of messages."""

    def __init__(self, names: Sequence[str], reads: Reads = "position") -> None:
        """Raises InputError for no names, or one that is there twice."""
        self.names, self.reads = tuple(names), reads
        if not names or len(set(names)) != len(names):
            raise InputError(f"expected at least one joint and each once, got {', '.join(names) or 'none'}", item="joints")
        self._newest: dict[str, Measured] = {}

    def take(self, message: AnyJointState) -> bool:
        """Take in what a message says of these joints; True where it says something. Older values than those that are held change nothing.

        A message that holds none of them may be whatever it likes. Raises InputError as `joint_values` does, and for one that is not
        stamped; nothing of such a message is taken.
        """
        if not set(self.names).intersection(message.name):
            return False
        values = joint_values(message, self.reads)
        captured = stamped(message.header.stamp, "joint state")
        for name in self.names:
            held = self._newest.get(name)
            if name in values and (held is None or held.captured <= captured):
                self._newest[name] = Measured(values[name], captured)
        return True

    @property
    def missing(self) -> tuple[str, ...]:
        """The joints of which nothing has been heard."""
        return tuple(name for name in self.names if name not in self._newest)

    def values(self) -> tuple[list[float], int]:
        """The values in the order of the names, and when the oldest of them was measured. Raises InputError for joints not heard of."""
        if self.missing:
            raise InputError(f"nothing has been heard of {', '.join(self.missing)}", item="joint state")
        held = [self._newest[name] for name in self.names]
        return [measured.value for measured in held], min(measured.captured for measured in held)

    def clear(self) -> None:
        """Forget everything."""
        self._newest.clear()
