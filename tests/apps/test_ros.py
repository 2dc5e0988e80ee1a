"""`mmsdk ros`: what is told of a parameter file before any ROS is asked for."""

import json
import re
from pathlib import Path

import pytest

from mmsdk.apps.cli import main
from mmsdk.vla.ros.binding import bound
from mmsdk.vla.ros.binding import declared as declared_topics
from mmsdk.vla.ros.parameters import Parameters, parse_parameters
from mmsdk.vla.ros.settings import NODE, contract_of

POLICY = """
from mmsdk.vla.envs.planar_arm import planar_contract
from mmsdk.vla.wire.service import Service


class Stay:
    def reset(self, episode):
        pass


def arm():
    return Service(planar_contract("position"), Stay)
"""
TOPICS = """
    cameras: {side: {topic: /camera}}
    state: {joints: {topic: /joint_states, names: [base, elbow, wrist]}}
    action: {joints: {topic: /arm/joint_trajectory, names: [base, elbow, wrist]}}
"""
INLINE = """
    contract: |
      name: other
      rate: 10.0
      cameras: []
      state: [{name: joints, kind: joint, size: 3, unit: rad, low: -2.0, high: 2.0}]
      action:
        - {name: joints, kind: joint, size: 3, unit: rad, low: -2.0, high: 2.0, control: position, meaning: absolute, measured: joints}
"""


@pytest.mark.parametrize(
    ("parameters", "hint"),
    [
        (
            "    policy: arm.py:arm" + TOPICS.replace("side", "front"),
            "cameras.front.topic: is not declared; did you mean cameras.side.topic?",
        ),
        ("    policy: arm.py:arm" + TOPICS + INLINE, "the policy is for another robot: contract.name is 'planar arm', expected 'other'"),
        ("    policy: ws://127.0.0.1:1" + TOPICS, "needs the robot's contract in this file"),
        ("    policy: arm.py" + TOPICS, "names no function; write: policy: FILE.py:NAME"),
        ("    policy: arm.py:arm\n    pace: {expert: 0}" + TOPICS, "pace.expert: 0 lies outside of 1"),
        ("    policy: arm.py:arm\n    plan: best" + TOPICS, "'best' is none of receding, ensemble"),
        ("    policy: arm.py:arm\n    contract: missing.yaml" + TOPICS, "missing.yaml: cannot be read"),
        (TOPICS.lstrip("\n"), "policy missing"),
    ],
)
def test_a_file_that_is_wrong_is_told_with_its_place(
    parameters: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "arm.py").write_text(POLICY, encoding="utf-8")
    path = tmp_path / "robot.yaml"
    path.write_text(f"/policy:\n  ros__parameters:\n{parameters}", encoding="utf-8")
    assert main(["ros", "run", "--params", str(path), "--json"]) == 2
    assert hint in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_node_that_the_file_does_not_speak_of_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "robot.yaml"
    path.write_text("/policy: {ros__parameters: {policy: arm.py:arm}}", encoding="utf-8")
    assert main(["ros", "run", "--params", str(path), "--node", "/arm/policy", "--json"]) == 2
    assert "says nothing of a node /arm/policy" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert main(["ros", "run", "--json"]) == 2
    assert "--params" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_the_robot_of_the_documentation_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything in it is known and fits together: what is missing afterwards is ROS."""
    page = (Path(__file__).parents[2] / "docs" / "ros.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    path = tmp_path / "robot.yaml"
    path.write_text(block.replace("my_policy.py:arm", "ws://127.0.0.1:1"), encoding="utf-8")
    monkeypatch.setattr("mmsdk.vla.ros.rclpy_graph.find_spec", lambda name: None)
    assert main(["ros", "run", "--params", str(path), "--json"]) == 2
    assert "rclpy is not installed" in json.loads(capsys.readouterr().out)["error"]["message"]
    declared = parse_parameters(block, "/policy")
    contract = contract_of(str(declared["contract"]), tmp_path)
    assert contract is not None and contract.action_size == 7
    parameters = Parameters((*NODE, *declared_topics(contract)), declared)
    assert bound(contract, parameters).outputs.keys() == {"/arm_controller/joint_trajectory", "/hand_controller/joint_trajectory"}


def test_rclpy_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "arm.py").write_text(POLICY, encoding="utf-8")
    path = tmp_path / "robot.yaml"
    path.write_text(f"/policy:\n  ros__parameters:\n    policy: arm.py:arm{TOPICS}", encoding="utf-8")
    monkeypatch.setattr("mmsdk.vla.ros.rclpy_graph.find_spec", lambda name: None)
    for action in ("run", "simulate"):
        assert main(["ros", action, "--params", str(path), "--json"]) == 2
        assert "rclpy is not installed; pip install '.[ros]' in the clone" in json.loads(capsys.readouterr().out)["error"]["message"]
