"""One feature's numbers as another contract means them: units, rotation layout and tool frame, polarity of the gripper; never guessed."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vla.contract import UNITS, Feature
from mmsdk.vla.rotation import canonical, compose, from_quaternion, inverse, to_quaternion

__all__ = ["Conversion"]

_IDENTITY = (1.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Conversion:
    """From what `source` means to what `target` means. Building one raises InputError where the two are not the same kind of thing.

    Its inverse is `Conversion(target, source)`: the round trip is the identity, but for a gripper that knows only opened and closed, and
    for the sign of a quaternion, which is kept where the target says so.
    """

    source: Feature
    target: Feature

    def __post_init__(self) -> None:
        source, target = self.source, self.target
        item = f"{source.name} -> {target.name}"
        if source.kind != target.kind:
            raise InputError(f"a {source.kind} is no {target.kind}", item=item)
        if source.kind != "rotation" and source.size != target.size:
            raise InputError(f"{source.size} numbers for {target.size}; none is made up or dropped", item=item)
        if source.kind not in ("gripper", "rotation") and UNITS[source.unit][0] != UNITS[target.unit][0]:
            raise InputError(f"{source.unit} cannot be turned into {target.unit}", item=item)

    def __call__(self, values: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        """Values of the source as the target's, in the same dtype."""
        if values.shape[-1] != self.source.size:
            raise InputError(f"{values.shape[-1]} numbers, expected {self.source.size}", item=self.source.name)
        if self.source.kind == "rotation":
            return self._turned(values)
        if self.source.kind == "gripper":
            return self._gripped(values)
        return values * self.scale

    @property
    def scale(self) -> float:
        """By how much a difference of two values grows: a step or a relative action is only ever scaled."""
        if self.source.kind == "gripper":
            start, end = _ends(self.source), _ends(self.target)
            return (end[1] - end[0]) / (start[1] - start[0])
        return UNITS[self.source.unit][1] / UNITS[self.target.unit][1]

    def difference(self, values: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        """A step or relative action of the source as the target's. Raises InputError for rotations that differ in layout or frame."""
        source, target = self.source, self.target
        if source.kind == "rotation" and (source.layout, source.tool) != (target.layout, target.tool):
            raise InputError("turns relative to one another keep their layout and tool frame", item=f"{source.name} -> {target.name}")
        return values * self.scale

    def _turned(self, values: Tensor) -> Tensor:
        source, target = self.source, self.target
        q = to_quaternion(values.double() * _radians(source), source.layout)
        q = compose(compose(q, inverse(q.new_tensor(source.tool))), q.new_tensor(target.tool))
        turned = from_quaternion(q if target.keep_sign else canonical(q), target.layout)
        return (turned / _radians(target)).to(values.dtype)

    def _gripped(self, values: Tensor) -> Tensor:
        (opened, closed), (target_opened, target_closed) = _ends(self.source), _ends(self.target)
        share = (values - opened) / (closed - opened)
        if self.target.binary:
            # neither opened nor closed: NaN stays NaN, for whoever judges it
            share = torch.where(share.isnan(), share, (share > 0.5).to(values.dtype))
        return target_opened + share * (target_closed - target_opened)


def _ends(feature: Feature) -> tuple[float, float]:
    assert feature.opened is not None and feature.closed is not None, "a gripper declares both"
    return feature.opened, feature.closed


def _radians(feature: Feature) -> float:
    """Angles may be in degrees; quaternions and matrices have no unit."""
    return UNITS[feature.unit][1] if feature.layout.startswith(("euler", "axis")) else 1.0
