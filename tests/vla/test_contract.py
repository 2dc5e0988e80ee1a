"""Contracts: YAML in, values out, and whatever is left open or wrong is named with its place."""

from pathlib import Path

import pytest

from mmsdk.errors import InputError
from mmsdk.vla.contract import Contract, Feature
from mmsdk.vla.contract_file import load_contract, parse_contract

YAML = """
name: franka
rate: 15
cameras:
  - {name: front, height: 480, width: 640, colour: bgr, layout: hwc, turned: 180}
state:
  - {name: joints, kind: joint, size: 7, unit: rad, low: -2.9, high: 2.9}
  - {name: gripper, kind: gripper, size: 1, unit: fraction, low: 0, high: 1, opened: 0, closed: 1}
action:
  - {name: joints, kind: velocity, size: 7, unit: rad/s, low: -1.0, high: 1.0, control: velocity, meaning: absolute, measured: joints,
     acceleration: 5, jerk: .inf, lag: 0.2}
  - {name: gripper, kind: gripper, size: 1, unit: fraction, low: 0, high: 1, opened: 0, closed: 1, control: position, meaning: absolute,
     measured: gripper}
timing: {stale: 0.3}
"""


def test_a_file_becomes_a_contract(tmp_path: Path) -> None:
    path = tmp_path / "franka.yaml"
    path.write_text(YAML)
    contract = load_contract(path)
    assert isinstance(contract, Contract)
    assert (contract.state_size, contract.action_size) == (8, 8)
    assert contract.state[0].low == (-2.9,) * 7 and contract.action[0].acceleration == 5.0
    assert contract.action_columns("gripper") == slice(7, 8) and contract.timing.stale == 0.3
    assert contract.cameras[0].upright_size == (480, 640)
    assert [column for _, _, column in contract.each_command()] == list(range(8))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("rate: 15", "rat: 15", "'rat' is not known; did you mean 'rate'"),
        ("rate: 15\n", "", "rate missing"),
        ("rate: 15", "rate: 1e1", "write 1.0e-3"),
        ("rate: 15", "rate: -1", "a rate of -1.0"),
        ("rate: 15", "rate: 15\nrate: 20", "'rate' stands there twice"),
        ("colour: bgr", "colour: BGR", "cameras.0.: colour: 'BGR' is none of rgb, bgr"),
        ("turned: 180", "turned: 45", "is none of 0, 90, 180, 270"),
        ("turned: 180", "turned: 180.0", "is none of 0, 90, 180, 270"),
        ("size: 7, unit: rad,", "size: 7, unit: radians,", "state.0.: feature joints: the unit 'radians'"),
        ("size: 7, unit: rad,", "size: true, unit: rad,", "expected int, got True"),
        ("low: -2.9, high: 2.9", "low: [-2.9, -1], high: 2.9", "size 7, 2 low and 7 high"),
        ("low: -2.9", "low: 3", "range"),
        ("low: 0, high: 1, opened: 0, closed: 1}", "low: 0, high: 1}", "polarity is never guessed"),
        ("control: position, meaning: absolute,\n     measured: gripper", "control: position, meaning: absolute", "holding the measured"),
        ("measured: joints,", "measured: arm,", "measured by 'arm', but the state is joints, gripper"),
        ("jerk: .inf", "jerk: 0", "numbers above 0"),
        # what keeps the robot moving is never held as if it were a place
        ("control: velocity", "control: position", "a velocity in rad/s under control 'position': standing still would not be zero"),
        ("control: velocity", "control: effort", "its control is 'velocity'"),
        ("kind: velocity, size: 7, unit: rad/s", "kind: effort, size: 7, unit: N m", "its control is 'effort'"),
        ("timing: {stale: 0.3}", "timing: {recover: 100000000000000000000000}", "recover from 1 to a million"),
        ("name: franka", "name: [", "not YAML"),
        ("name: franka", "name: " + "[" * 2000 + "]" * 2000, "nested too deeply"),
        ("rate: 15", "rate: 2026-13-01", "not YAML: a value"),
        ("rate: 15", "rate: !!float fast", "not YAML: a value"),
        ("rate: 15", "rate: !!bool maybe", "not YAML: a value"),
        ("rate: 15", "rate: !!timestamp now", "not YAML: a value"),
        ("rate: 15", "rate: 1" + "0" * 400, "rate: a number beyond"),
        ("rate: 15", "rate: 1" + "0" * 5000, "not YAML: a value"),
        ("size: 7, unit: rad,", "size: 1000000000000, unit: rad,", "at most 4,096"),
        ("size: 7, unit: rad,", "size: 1" + "0" * 30 + ", unit: rad,", "at most 4,096"),
        ("name: franka", "name: !!python/object:os.system {}", "not YAML"),
        ("{name: gripper, kind: gripper, size: 1", "{name: joints, kind: gripper, size: 1", "'joints'. stand there twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(old: str, new: str, told: str) -> None:
    assert old in YAML
    with pytest.raises(InputError, match=told):
        parse_contract(YAML.replace(old, new, 1), "franka.yaml")


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="nowhere.yaml"):
        load_contract("nowhere.yaml")


def test_a_tool_that_is_no_turn_is_refused() -> None:
    for tool in ((2.0, 0.0, 0.0, 0.0), (float("nan"), 0.0, 0.0, 0.0)):
        with pytest.raises(InputError, match="is no unit quaternion"):
            Feature("hand", "rotation", 4, "one", (-1.0,) * 4, (1.0,) * 4, layout="wxyz", tool=tool)
