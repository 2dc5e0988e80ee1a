"""Rotations in every layout that robots and policies use, converted by name and never guessed.

Layouts: "wxyz" (MuJoCo) and "xyzw" (ROS) unit quaternions; "axis_angle", the axis times radians; "rot6d_rows" and "rot6d_columns", the
first two rows or columns of the matrix one after the other (On the Continuity of Rotation Representations, arXiv 1812.07035);
"euler_xyz" and the other five orders, radians about fixed axes, and in capitals ("euler_XYZ") about the axes that turn along, as SciPy
names them.

Everything goes by way of the quaternion, which keeps its sign: q and -q are one rotation, but not one input to a model. `canonical`
picks the sign with w >= 0 and with it the axis-angle of at most pi; without it a quaternion's own sign shows in the axis-angle, as in
robosuite.
"""

from itertools import permutations

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError

__all__ = ["ROTATIONS", "canonical", "compose", "convert_rotation", "from_quaternion", "inverse", "to_quaternion"]

_ORDERS = ["".join(order) for order in permutations("xyz")]

ROTATIONS: dict[str, int] = {
    "wxyz": 4,
    "xyzw": 4,
    "axis_angle": 3,
    "rot6d_rows": 6,
    "rot6d_columns": 6,
    **{f"euler_{order}": 3 for order in [*_ORDERS, *map(str.upper, _ORDERS)]},
}
"""How many numbers each layout has."""

_UNIT = 1e-3
_TINY = 1e-12


def convert_rotation(values: Float[Tensor, "*n i"], source: str, target: str, keep_sign: bool = False) -> Float[Tensor, "*n o"]:
    """Rotations of one layout in another; the dtype stays. With `keep_sign` a quaternion keeps its sign, else w >= 0.

    Raises InputError for an unknown layout, a wrong number of numbers, what is not finite, and what is no rotation (a quaternion that is
    not of unit length, two rows that are parallel).
    """
    quaternion = to_quaternion(values, source)
    return from_quaternion(quaternion if keep_sign else canonical(quaternion), target).to(values.dtype)


def to_quaternion(values: Float[Tensor, "*n i"], layout: str) -> Float[Tensor, "*n 4"]:
    """w, x, y, z in double precision; see `convert_rotation` for the errors."""
    _check(values, layout)
    x = values.double()
    if layout in ("wxyz", "xyzw"):
        return _unit(x if layout == "wxyz" else x.roll(1, -1), layout)
    if layout == "axis_angle":
        return _turn(x)
    if layout.startswith("rot6d"):
        first, second = _orthonormal(x[..., :3], x[..., 3:], layout)
        matrix = torch.stack((first, second, torch.linalg.cross(first, second)), dim=-2)
        return _of_matrix(matrix if layout == "rot6d_rows" else matrix.mT)
    return _of_euler(x, layout.removeprefix("euler_"))


def from_quaternion(quaternion: Float[Tensor, "*n 4"], layout: str) -> Float[Tensor, "*n o"]:
    """Unit quaternions w, x, y, z in another layout, in double precision and with their sign as it is. Raises InputError."""
    _check(quaternion, "wxyz")
    q = _unit(quaternion.double(), "wxyz")
    if layout == "wxyz":
        return q
    if layout == "xyzw":
        return q.roll(-1, -1)
    if layout == "axis_angle":
        return _axis_angle(q)
    _known(layout)
    matrix = _matrix(q)
    if layout.startswith("rot6d"):
        return (matrix if layout == "rot6d_rows" else matrix.mT)[..., :2, :].flatten(-2)
    return _euler(matrix, layout.removeprefix("euler_"))


def canonical(quaternion: Float[Tensor, "*n 4"]) -> Float[Tensor, "*n 4"]:
    """The one of q and -q whose first number other than zero is positive."""
    nonzero = quaternion.abs() > _TINY
    first = quaternion.gather(-1, nonzero.int().argmax(-1, keepdim=True))
    return torch.where(first < 0, -quaternion, quaternion)


def compose(left: Float[Tensor, "*n 4"], right: Float[Tensor, "*#n 4"]) -> Float[Tensor, "*n 4"]:
    """The quaternion of turning by `right`, then by `left` (both w, x, y, z)."""
    w, v = left[..., :1], left[..., 1:]
    s, u = right[..., :1], right[..., 1:]
    v, u = torch.broadcast_tensors(v, u)
    return torch.cat((w * s - (v * u).sum(-1, keepdim=True), w * u + s * v + torch.linalg.cross(v, u)), dim=-1)


def inverse(quaternion: Float[Tensor, "*n 4"]) -> Float[Tensor, "*n 4"]:
    """The turn back."""
    return torch.cat((quaternion[..., :1], -quaternion[..., 1:]), dim=-1)


def _known(layout: str) -> None:
    if layout not in ROTATIONS:
        raise InputError(f"there is no rotation layout {layout!r}; there is {', '.join(ROTATIONS)}")


def _check(values: Tensor, layout: str) -> None:
    _known(layout)
    if values.shape[-1] != ROTATIONS[layout]:
        raise InputError(f"a rotation in {layout} has {ROTATIONS[layout]} numbers, got {values.shape[-1]}")
    if not bool(values.isfinite().all()):
        raise InputError(f"a rotation in {layout} is not finite")


def _unit(q: Tensor, layout: str) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(q, dim=-1, keepdim=True)
    if bool(((length - 1).abs() > _UNIT).any()):
        raise InputError(f"a quaternion in {layout} has the length {float(length.flatten()[0]):.4g}, expected 1; is it another layout?")
    return q / length


def _turn(axis_angle: Tensor) -> Tensor:
    angle = torch.linalg.vector_norm(axis_angle, dim=-1, keepdim=True)
    # sin(angle / 2) / angle without dividing by zero
    share = torch.sinc(angle / (2 * torch.pi)) / 2
    return torch.cat((torch.cos(angle / 2), axis_angle * share), dim=-1)


def _axis_angle(q: Tensor) -> Tensor:
    sine = torch.linalg.vector_norm(q[..., 1:], dim=-1, keepdim=True)
    angle = 2 * torch.atan2(sine, q[..., :1])
    return q[..., 1:] * torch.where(sine > _TINY, angle / sine.clamp_min(_TINY), torch.full_like(sine, 2.0))


def _orthonormal(first: Tensor, second: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Gram-Schmidt: what a model puts out is never quite orthogonal."""
    one = torch.linalg.vector_norm(first, dim=-1, keepdim=True)
    first = first / one.clamp_min(_TINY)
    second = second - (first * second).sum(-1, keepdim=True) * first
    two = torch.linalg.vector_norm(second, dim=-1, keepdim=True)
    if bool(((one < 1e-6) | (two < 1e-6)).any()):
        raise InputError(f"a rotation in {layout} has two parallel or vanishing vectors, which span no frame")
    return first, second / two


def _matrix(q: Tensor) -> Tensor:
    w, x, y, z = q.unbind(-1)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def _of_matrix(m: Tensor) -> Tensor:
    """The symmetric 4 x 4 matrix 4 q q^T: its row of the largest diagonal element is q times a number far from zero."""
    a, b, c = m[..., 0, 0], m[..., 1, 1], m[..., 2, 2]
    x, y, z = m[..., 2, 1] - m[..., 1, 2], m[..., 0, 2] - m[..., 2, 0], m[..., 1, 0] - m[..., 0, 1]
    xy, xz, yz = m[..., 1, 0] + m[..., 0, 1], m[..., 0, 2] + m[..., 2, 0], m[..., 2, 1] + m[..., 1, 2]
    rows = ((1 + a + b + c, x, y, z), (x, 1 + a - b - c, xy, xz), (y, xy, 1 - a + b - c, yz), (z, xz, yz, 1 - a - b + c))
    outer = torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)
    largest = outer.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None].expand(*outer.shape[:-2], 1, 4)
    q = outer.gather(-2, largest).squeeze(-2)
    return canonical(q / torch.linalg.vector_norm(q, dim=-1, keepdim=True))


def _axes(order: str) -> list[int]:
    """The fixed axes in the order of the turns; angles about axes that turn along are those about fixed axes in the opposite order."""
    axes = ["xyz".index(letter) for letter in order.lower()]
    return axes[::-1] if order.isupper() else axes


def _of_euler(angles: Tensor, order: str) -> Tensor:
    values = angles.flip(-1) if order.isupper() else angles
    q = torch.zeros(*values.shape[:-1], 4, dtype=values.dtype, device=values.device)
    q[..., 0] = 1.0
    for place, axis in enumerate(_axes(order)):
        turn = torch.zeros_like(q)
        turn[..., 0], turn[..., axis + 1] = torch.cos(values[..., place] / 2), torch.sin(values[..., place] / 2)
        q = compose(turn, q)
    return q


def _euler(m: Tensor, order: str) -> Tensor:
    """Where the middle angle is a right one (gimbal lock) the last fixed axis gets the angle 0."""
    i, j, k = _axes(order)
    sign = 1.0 if (i, j, k) in ((0, 1, 2), (1, 2, 0), (2, 0, 1)) else -1.0
    cosine = torch.hypot(m[..., i, i], m[..., j, i])
    middle, locked = torch.atan2(-sign * m[..., k, i], cosine), cosine < 1e-7
    first = torch.where(locked, torch.atan2(-sign * m[..., j, k], m[..., j, j]), torch.atan2(sign * m[..., k, j], m[..., k, k]))
    last = torch.where(locked, torch.zeros_like(middle), torch.atan2(sign * m[..., j, i], m[..., i, i]))
    angles = torch.stack((first, middle, last), dim=-1)
    return angles.flip(-1) if order.isupper() else angles
