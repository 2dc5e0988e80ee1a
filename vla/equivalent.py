"""One rotation has many names: q and -q, angles a whole turn apart. Which of them are meant, next to what was commanded before.

Compared number by number, an angle that goes on from 3.13 to -3.13 looks like a sweep all the way round, and a quaternion that changes its
sign like half a turn. So numbers are first brought to the name that is nearest to the last one: motions, limits and differences are then of
the rotation and not of its spelling. What is sent is spelt inside of the declared range again.

An angle whose range is a whole turn has no end there (`endless`): it is limited in speed, not in place. A narrower range is a limit, and
names inside of it come before nearer ones outside.
"""

from collections.abc import Sequence
from math import ceil, dist, hypot, tau

from mmsdk.vla.contract import UNITS, Feature

__all__ = ["endless", "follow", "in_range", "nearest", "no_rotation", "thin", "unwind", "whole"]

_SEAM = 0.01
_EDGE = 1e-6
_TINY = 1e-9
_OFF = 0.1
_THIN = 0.5
_WOUND = 0.75


def nearest(feature: Feature, values: Sequence[float], last: Sequence[float]) -> list[float]:
    """The numbers of a rotation under the name nearest to `last`, names inside of the range first; a quaternion at unit length.

    Numbers of another kind stay as they are, and so do those of rot6d, which has one name for each rotation.
    """
    names = _names(feature, values, last)
    return min(names, key=lambda name: (_outside(feature, name), dist(name, last)))


def follow(features: Sequence[Feature], values: Sequence[float], last: Sequence[float]) -> list[float]:
    """The same for features that stand one after the other."""
    near: list[float] = []
    for feature in features:
        columns = slice(len(near), len(near) + feature.size)
        near += nearest(feature, values[columns], last[columns])
    return near


def in_range(feature: Feature, values: Sequence[float]) -> list[float]:
    """The numbers as they are sent: an endless angle inside of its range, a quaternion at unit length."""
    if _signed(feature):
        return _unit(values)
    limits = list(zip(values, feature.low, feature.high, endless(feature), strict=True))
    if _angles(feature) == "euler":
        return [_wrapped(value, low, high, _turn(feature)) if free else value for value, low, high, free in limits]
    length = hypot(*values)
    if _angles(feature) and all(endless(feature)) and not all(low <= value <= high for value, low, high, _ in limits):
        share = 1 - round(length / _turn(feature)) * _turn(feature) / length
        return [min(max(value * share, low), high) for value, low, high, _ in limits]
    return list(values)


def endless(feature: Feature) -> tuple[bool, ...]:
    """Which numbers of a feature are angles that may turn on and on, for their range is a whole turn (within a hundredth of a radian)."""
    slack = _SEAM / tau * _turn(feature)
    if _angles(feature) == "euler":
        return tuple(high - low >= _turn(feature) - slack for low, high in zip(feature.low, feature.high, strict=True))
    half = _turn(feature) / 2 - slack
    whole = bool(_angles(feature)) and max(feature.low) <= -half and min(feature.high) >= half
    return (whole,) * feature.size


def unwind(feature: Feature, place: Sequence[float], rates: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """An axis-angle wound up by more than three quarters of a turn as the one of under a quarter, with its rates of change.

    At a whole turn every axis is as good as any other, and numbers no longer follow the rotation: they are kept away from there. Along the
    axis a rate stays what it is; across it turns with the axis and shrinks with the angle.
    """
    length = hypot(*place)
    if _angles(feature) != "axis" or length <= _WOUND * _turn(feature):
        return list(place), [list(rate) for rate in rates]
    axis, share = [value / length for value in place], 1 - round(length / _turn(feature)) * _turn(feature) / length
    along = [sum(part * rate for part, rate in zip(axis, each, strict=True)) for each in rates]
    turned = [
        [share * value + (1 - share) * part * way for part, value in zip(axis, each, strict=True)]
        for each, way in zip(rates, along, strict=True)
    ]
    return [value * share for value in place], turned


def no_rotation(feature: Feature, values: Sequence[float]) -> str:
    """Why numbers are no rotation, "" where they are one: a quaternion far from unit length, two rows of rot6d that span no frame."""
    if _signed(feature) and abs(hypot(*values) - 1) > _OFF:
        return f"{feature.name} is a quaternion of length {hypot(*values):.4g}, expected 1"
    if feature.kind == "rotation" and feature.layout.startswith("rot6d"):
        first, second = values[:3], values[3:]
        one, two = hypot(*first), hypot(*second)
        if min(one, two) < _OFF or abs(sum(a * b for a, b in zip(first, second, strict=True))) > (1 - _EDGE) * one * two:
            return f"{feature.name} has two parallel or vanishing vectors, which span no frame"
    return ""


def thin(feature: Feature, values: Sequence[float]) -> bool:
    """Whether numbers on the way from one rotation to another hardly tell one any more: a small step of theirs is then a leap of it.

    So are quaternions of less than half their length, and two rows of rot6d that short or less than 30 degrees from one line.
    """
    if _signed(feature):
        return hypot(*values) < _THIN
    if feature.kind != "rotation" or not feature.layout.startswith("rot6d"):
        return False
    first, second = values[:3], values[3:]
    one, two = hypot(*first), hypot(*second)
    across = sum(a * b for a, b in zip(first, second, strict=True))
    return min(one, two) < _THIN or across * across > (1 - _THIN * _THIN) * (one * two) ** 2


def whole(feature: Feature, values: Sequence[float]) -> list[float]:
    """The same rotation in numbers of full length: a quaternion's, or two rows of rot6d at a right angle."""
    if _signed(feature) or feature.kind != "rotation" or not feature.layout.startswith("rot6d"):
        return _unit(values) if _signed(feature) else list(values)
    first = _unit(values[:3])
    along = sum(a * b for a, b in zip(first, values[3:], strict=True))
    return first + _unit([b - along * a for a, b in zip(first, values[3:], strict=True)])


def _signed(feature: Feature) -> bool:
    return feature.kind == "rotation" and feature.layout in ("wxyz", "xyzw")


def _angles(feature: Feature) -> str:
    """Which angles it is told in: "euler" or "axis"; "" for what is told otherwise."""
    layout = feature.layout if feature.kind == "rotation" else ""
    return "euler" if layout.startswith("euler") else "axis" if layout == "axis_angle" else ""


def _turn(feature: Feature) -> float:
    """A whole turn in the feature's unit."""
    return tau / UNITS[feature.unit][1]


def _names(feature: Feature, values: Sequence[float], last: Sequence[float]) -> list[list[float]]:
    if _signed(feature):
        unit = _unit(values)
        return [unit, [-value for value in unit]]
    if _angles(feature) == "axis":
        return _axis_names(_turn(feature), values, last)
    if _angles(feature) == "euler":
        half = _turn(feature) / 2
        # turning the first and last by half a turn and mirroring the middle one is the same rotation
        mirrored = [values[0] + half, half - values[1], values[2] + half]
        return [_euler_name(feature, angles, last) for angles in (values, mirrored)]
    return [list(values)]


def _axis_names(turn: float, values: Sequence[float], last: Sequence[float]) -> list[list[float]]:
    """The same axis, some whole turns more or less; no turn at all is whole turns about any axis, the last one's too."""
    length = hypot(*values)
    along, norm = (values, length) if length > _TINY else (last, hypot(*last))
    if norm <= _TINY:
        return [list(values)]
    axis = [part / norm for part in along]
    angle = length if length > _TINY else 0.0
    near = round((sum(part * value for part, value in zip(axis, last, strict=True)) - angle) / turn)
    wound = [[part * (angle + count * turn) for part in axis] for count in (near, near - 1, near + 1, -round(angle / turn)) if count]
    return [list(values), *wound]


def _euler_name(feature: Feature, angles: Sequence[float], last: Sequence[float]) -> list[float]:
    turn, name = _turn(feature), []
    for angle, before, low, high, free in zip(angles, last, feature.low, feature.high, endless(feature), strict=True):
        near = angle + turn * round((before - angle) / turn)
        side = turn if before > near else -turn
        # nearest first; where none is in the range, the nearest of all
        names = (near, near + side, near - side)
        name.append(next((each for each in names if free or low - _EDGE <= each <= high + _EDGE), near))
    return name


def _outside(feature: Feature, name: Sequence[float]) -> bool:
    limits = zip(name, feature.low, feature.high, endless(feature), strict=True)
    return not all(free or low - _EDGE <= value <= high + _EDGE for value, low, high, free in limits)


def _unit(values: Sequence[float]) -> list[float]:
    length = hypot(*values)
    # what is of unit length but for rounding passes to the last digit
    return [value / length for value in values] if length > _TINY and abs(length - 1) > _TINY else list(values)


def _wrapped(value: float, low: float, high: float, turn: float) -> float:
    if low <= value <= high:
        return value
    inside = value - turn * ceil((value - high) / turn) if value > high else value + turn * ceil((low - value) / turn)
    return min(max(inside, low), high)
