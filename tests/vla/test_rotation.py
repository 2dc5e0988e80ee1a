"""Rotations: every layout against SciPy, golden values, round trips. VR-23, and the double cover of quaternions."""

from math import pi, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from mmsdk.errors import InputError
from mmsdk.vla.rotation import ROTATIONS, canonical, compose, convert_rotation, inverse, to_quaternion

HALF = sqrt(0.5)
LAYOUTS = list(ROTATIONS)


def by_scipy(rotation: Rotation, layout: str) -> np.ndarray:
    """What SciPy, which knows nothing of this package, writes for a rotation."""
    if layout in ("xyzw", "wxyz"):
        q = rotation.as_quat(canonical=True)
        return q if layout == "xyzw" else np.roll(q, 1, -1)
    if layout == "axis_angle":
        return rotation.as_rotvec()
    if layout.startswith("rot6d"):
        matrix = rotation.as_matrix()
        matrix = matrix if layout.endswith("rows") else np.swapaxes(matrix, -1, -2)
        return matrix[..., :2, :].reshape(*matrix.shape[:-2], 6)
    return rotation.as_euler(layout.removeprefix("euler_"))


# VR-23: 90 degrees about z, written out by hand
QUARTER = {
    "wxyz": [HALF, 0, 0, HALF],
    "xyzw": [0, 0, HALF, HALF],
    "axis_angle": [0, 0, pi / 2],
    "rot6d_rows": [0, -1, 0, 1, 0, 0],
    "rot6d_columns": [0, 1, 0, -1, 0, 0],
    "euler_xyz": [0, 0, pi / 2],
    "euler_XYZ": [0, 0, pi / 2],
    "euler_zyx": [pi / 2, 0, 0],
}
NOTHING = {name: [0.0] * size for name, size in ROTATIONS.items()} | {
    "wxyz": [1, 0, 0, 0],
    "xyzw": [0, 0, 0, 1],
    "rot6d_rows": [1, 0, 0, 0, 1, 0],
    "rot6d_columns": [1, 0, 0, 0, 1, 0],
}


@pytest.mark.parametrize("golden", [QUARTER, NOTHING], ids=["quarter", "identity"])
def test_vr_23_golden_values_of_every_layout_agree(golden: dict[str, list[float]]) -> None:
    for source, values in golden.items():
        for target, wanted in golden.items():
            got = convert_rotation(torch.tensor(values, dtype=torch.float64), source, target)
            torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("target", LAYOUTS)
def test_vr_23_every_pair_of_layouts_agrees_with_scipy(target: str) -> None:
    rotation = Rotation.random(64, random_state=0)
    wanted = torch.from_numpy(by_scipy(rotation, target))
    for source in LAYOUTS:
        got = convert_rotation(torch.from_numpy(by_scipy(rotation, source)), source, target)
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)


@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.lists(st.floats(-1, 1), min_size=4, max_size=4))
@settings(max_examples=80, deadline=None)
def test_there_and_back_is_the_same_rotation(first: str, second: str, numbers: list[float]) -> None:
    q = torch.tensor(numbers, dtype=torch.float64)
    length = torch.linalg.vector_norm(q)
    q = q / length if length > 1e-3 else torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    there = convert_rotation(convert_rotation(q, "wxyz", first), first, second)
    back = to_quaternion(there, second)
    assert float((back * q).sum().abs()) == pytest.approx(1, abs=1e-7)


def test_gimbal_lock_gives_the_same_rotation() -> None:
    for order in ("xyz", "zyx", "XYZ", "ZYX", "yxz"):
        rotation = Rotation.from_euler(order, [0.3, pi / 2, -0.8])
        angles = convert_rotation(torch.from_numpy(rotation.as_quat()), "xyzw", f"euler_{order}").numpy()
        assert (Rotation.from_euler(order, angles).inv() * rotation).magnitude() < 1e-6


def test_a_quaternion_and_its_negative_differ_only_where_the_sign_is_kept() -> None:
    turn = torch.tensor([0.205, 0.41, 0.615], dtype=torch.float64)
    q = convert_rotation(turn, "axis_angle", "xyzw")
    torch.testing.assert_close(convert_rotation(-q, "xyzw", "axis_angle"), turn, atol=1e-9, rtol=0)
    # what robosuite's formula makes of -q
    kept = convert_rotation(-q, "xyzw", "axis_angle", keep_sign=True)
    torch.testing.assert_close(kept, torch.tensor([-1.47, -2.95, -4.42], dtype=torch.float64), atol=0.01, rtol=0)
    torch.testing.assert_close(canonical(torch.tensor([0.0, -1.0, 0, 0])), torch.tensor([0.0, 1, 0, 0]))


def test_what_a_model_puts_out_is_made_orthonormal() -> None:
    noisy = torch.tensor([0.9, 0.1, 0.0, -0.2, 1.3, 0.1], dtype=torch.float64)
    rows = convert_rotation(noisy, "rot6d_rows", "rot6d_rows").view(2, 3)
    torch.testing.assert_close(rows @ rows.T, torch.eye(2, dtype=torch.float64), atol=1e-9, rtol=0)


def test_composition_agrees_with_scipy_and_the_inverse_undoes_it() -> None:
    left, right = Rotation.random(8, random_state=1), Rotation.random(8, random_state=2)
    one, two = (to_quaternion(torch.from_numpy(each.as_quat()), "xyzw") for each in (left, right))
    wanted = to_quaternion(torch.from_numpy((left * right).as_quat()), "xyzw")
    torch.testing.assert_close(canonical(compose(one, two)), canonical(wanted), atol=1e-9, rtol=0)
    torch.testing.assert_close(
        compose(one, inverse(one)), torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64).expand(8, 4), atol=1e-9, rtol=0
    )


@pytest.mark.parametrize(
    ("values", "layout", "told"),
    [
        ([1, 0, 0, 0], "quaternion", "no rotation layout"),
        ([1, 0, 0], "wxyz", "has 4 numbers, got 3"),
        ([1, 1, 0, 0], "wxyz", "length 1.414"),
        ([float("nan"), 0, 0], "axis_angle", "not finite"),
        ([1, 0, 0, 2, 0, 0], "rot6d_rows", "parallel"),
    ],
)
def test_vr_23_what_is_no_rotation_is_refused(values: list[float], layout: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        convert_rotation(torch.tensor(values, dtype=torch.float64), layout, "wxyz")
