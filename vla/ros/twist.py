"""`geometry_msgs/Twist` both ways, its six numbers by name: "linear.x" to "linear.z" in m/s, "angular.x" to "angular.z" in rad/s."""

from collections.abc import Mapping
from math import isfinite

from mmsdk.errors import InputError
from mmsdk.vla.ros.messages import Twist, Vector3
from mmsdk.vla.ros.protocols import AnyTwist

__all__ = ["PARTS", "read_twist", "twist"]

PARTS = ("linear.x", "linear.y", "linear.z", "angular.x", "angular.y", "angular.z")


def twist(values: Mapping[str, float]) -> Twist:
    """A Twist with these parts; the others, which the robot cannot move along, are 0. Raises InputError for unknown or infinite parts."""
    unknown = sorted(set(values) - set(PARTS))
    if unknown or not all(map(isfinite, values.values())):
        raise InputError(f"{dict(values)}, expected finite numbers of {', '.join(PARTS)}", item="twist")
    six = [float(values.get(part, 0.0)) for part in PARTS]
    return Twist(Vector3(*six[:3]), Vector3(*six[3:]))


def read_twist(message: AnyTwist) -> dict[str, float]:
    """The six numbers by name. Raises InputError for what is not finite."""
    vectors = (message.linear, message.angular)
    values = dict(zip(PARTS, [float(value) for vector in vectors for value in (vector.x, vector.y, vector.z)], strict=True))
    broken = [part for part, value in values.items() if not isfinite(value)]
    if broken:
        raise InputError(f"{', '.join(broken)} is not finite", item="twist")
    return values
