"""Poses: `geometry_msgs/Pose` and `Transform` as one rigid motion that can be joined, undone and interpolated, checked on the way in."""

from dataclasses import dataclass
from math import acos, isfinite, sin, sqrt

from mmsdk.errors import InputError
from mmsdk.vla.ros.messages import Point, Pose, Quaternion, Transform, Vector3
from mmsdk.vla.ros.protocols import AnyPose, AnyQuaternion, AnyTransform, AnyVector3

__all__ = ["IDENTITY", "Rigid", "rigid_of_pose", "rigid_of_transform"]

Three = tuple[float, float, float]
Four = tuple[float, float, float, float]

_UNIT = 1e-3
# below this angle (rad) the sine says nothing any more, and a straight line is as good
_SMALL = 1e-6


@dataclass(frozen=True, slots=True)
class Rigid:
    """A translation in metres and a rotation x, y, z, w of unit length: from a frame's coordinates to its parent's."""

    translation: Three
    rotation: Four

    def after(self, inner: "Rigid") -> "Rigid":
        """First `inner`, then this: of b in a after c in b is c in a."""
        moved = _turned(self.rotation, inner.translation)
        x, y, z = (mine + theirs for mine, theirs in zip(self.translation, moved, strict=True))
        return Rigid((x, y, z), _product(self.rotation, inner.rotation))

    def inverse(self) -> "Rigid":
        """The way back."""
        x, y, z, w = self.rotation
        back = (-x, -y, -z, w)
        moved = _turned(back, self.translation)
        return Rigid((-moved[0], -moved[1], -moved[2]), back)

    def towards(self, other: "Rigid", share: float) -> "Rigid":
        """The share of the way to another: translation in a straight line, rotation by slerp on the shorter way round."""
        x, y, z = (mine + share * (theirs - mine) for mine, theirs in zip(self.translation, other.translation, strict=True))
        return Rigid((x, y, z), _slerp(self.rotation, other.rotation, share))

    def pose(self) -> Pose:
        """As a message."""
        return Pose(Point(*self.translation), Quaternion(*self.rotation))

    def transform(self) -> Transform:
        """As a message."""
        return Transform(Vector3(*self.translation), Quaternion(*self.rotation))


IDENTITY = Rigid((0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0))


def rigid_of_pose(pose: AnyPose, item: str = "pose") -> Rigid:
    """A Pose. Raises InputError for what is not finite, and a quaternion that is not of unit length to a thousandth."""
    return _rigid(pose.position, pose.orientation, item)


def rigid_of_transform(transform: AnyTransform, item: str = "transform") -> Rigid:
    """A Transform. Raises InputError for what is not finite, and a quaternion that is not of unit length to a thousandth."""
    return _rigid(transform.translation, transform.rotation, item)


def _rigid(place: AnyVector3, turn: AnyQuaternion, item: str) -> Rigid:
    translation = (float(place.x), float(place.y), float(place.z))
    x, y, z, w = float(turn.x), float(turn.y), float(turn.z), float(turn.w)
    if not all(map(isfinite, (*translation, x, y, z, w))):
        raise InputError(f"{translation}, {(x, y, z, w)} is not finite", item=item)
    length = sqrt(x * x + y * y + z * z + w * w)
    if not abs(length - 1) <= _UNIT:
        hint = "; it was never set" if length == 0 else ""
        raise InputError(f"the quaternion {(x, y, z, w)} has the length {length:.4g}, expected 1{hint}", item=item)
    return Rigid(translation, (x / length, y / length, z / length, w / length))


def _product(a: Four, b: Four) -> Four:
    """Turning by b, then by a."""
    ax, ay, az, aw = a
    bx, by, bz, bw = b
    return (
        aw * bx + ax * bw + ay * bz - az * by,
        aw * by - ax * bz + ay * bw + az * bx,
        aw * bz + ax * by - ay * bx + az * bw,
        aw * bw - ax * bx - ay * by - az * bz,
    )


def _turned(q: Four, v: Three) -> Three:
    x, y, z, w = q
    turned = _product(_product(q, (*v, 0.0)), (-x, -y, -z, w))
    return turned[0], turned[1], turned[2]


def _slerp(a: Four, b: Four, share: float) -> Four:
    """Spherical linear interpolation; q and -q are one rotation, so the nearer of the two is gone to."""
    cosine = sum(mine * theirs for mine, theirs in zip(a, b, strict=True))
    sign = -1.0 if cosine < 0 else 1.0
    angle = acos(min(1.0, abs(cosine)))
    if angle < _SMALL:
        first, second = 1 - share, sign * share
    else:
        first, second = sin((1 - share) * angle) / sin(angle), sign * sin(share * angle) / sin(angle)
    x, y, z, w = (first * mine + second * theirs for mine, theirs in zip(a, b, strict=True))
    length = sqrt(x * x + y * y + z * z + w * w)
    return x / length, y / length, z / length, w / length
