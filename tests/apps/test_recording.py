"""`mmsdk robot record`, `replay` and `export`: a loop written down, done again, and made a data set."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mmsdk.apps.cli import main
from mmsdk.vla.lerobot.reader import Dataset

SESSION = """
import torch

from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.contract import Workspace
from mmsdk.vla.drive import Session
from mmsdk.vla.envs.planar_arm import PlanarArm, planar_contract, tool
from mmsdk.vla.types import ActionChunk
from mmsdk.vla.worker import Delayed


class Reach:
    def __init__(self, goal):
        self.goal = torch.tensor(goal, dtype=torch.float64)

    def reset(self, episode):
        pass

    def __call__(self, request):
        seen = request.observation
        left = 0.9 ** torch.arange(1, 17, dtype=torch.float64)[:, None]
        return ActionChunk(self.goal + left * (seen.state - self.goal), seen.stamp)


def session(goal, **more):
    clock = SimulatedClock(7.0)
    robot = PlanarArm(planar_contract("position", **more), clock)
    forward = tool if more else None
    return Session(robot, Reach(goal), clock, lambda policy: Delayed(policy, clock, lambda request: 0.06), forward=forward)


def reach():
    return session([0.8, 0.2, 0.1])


def elsewhere():
    return session([0.0, 0.0, 0.0])


def boxed():
    return session([0.8, 0.2, 0.1], workspace=Workspace((-0.7, -0.7, -0.1), (0.7, 0.7, 0.1)))


def number():
    return 3
"""


@pytest.fixture
def session(tmp_path: Path) -> str:
    path = tmp_path / "session.py"
    path.write_text(SESSION, encoding="utf-8")
    return str(path)


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_a_loop_is_recorded_replayed_and_made_a_data_set(session: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, cups = str(tmp_path / "run"), str(tmp_path / "cups")
    assert main(["robot", "record", f"{session}:reach", "--out", run, "--ticks", "60", "--json"]) == 0
    recorded = told(capsys)
    assert recorded["robot"] == "planar arm" and recorded["ticks"] == 60 and recorded["recording"] == run
    assert main(["robot", "replay", run, "--json"]) == 0
    replayed = told(capsys)
    assert replayed["identical"] and replayed["commands"] >= 50 and replayed["report"]["requests"] == recorded["requests"]
    assert main(["robot", "replay", run, "--session", f"{session}:reach", "--ask", "--json"]) == 0
    assert told(capsys)["identical"]
    assert main(["robot", "export", run, run, "--out", cups, "--json"]) == 0
    made = told(capsys)
    assert made == {"dataset": cups, "robot": "planar arm", "episodes": 2, "frames": made["frames"]} and made["frames"] > 100
    dataset = Dataset(tmp_path / "cups")
    assert dataset.tasks(0)[0] == "reach" and dataset.numbers(0, "action")[-1].tolist() == pytest.approx([0.8, 0.2, 0.1], abs=0.05)
    assert len(list(dataset.pictures(1, "observation.images.side"))) == dataset.length(1)


def test_another_policy_is_found_out(session: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["robot", "record", f"{session}:reach", "--out", run, "--ticks", "20"]) == 0
    assert "20 ticks" in capsys.readouterr().out
    assert main(["robot", "replay", run, "--session", f"{session}:elsewhere", "--ask"]) == 1
    assert "then request 1: the policy answers otherwise than recorded" in capsys.readouterr().out


def test_a_workspace_takes_the_sessions_kinematics(session: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["robot", "record", f"{session}:boxed", "--out", run, "--ticks", "20", "--json"]) == 0
    assert main(["robot", "replay", run, "--json"]) == 2
    assert "forward kinematics" in capsys.readouterr().err
    assert main(["robot", "replay", run, "--session", f"{session}:boxed", "--json"]) == 0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["record", "SESSION:reach"], "a folder and at least one tick"),
        (["record", "SESSION:reach", "--out", "OUT", "--ticks", "0"], "at least one tick"),
        (["record", "SESSION:number", "--out", "OUT"], "gave a int, expected a Session"),
        (["replay", "OUT"], "no bag that can be read"),
        (["replay", "OUT", "--ask"], "a session to ask"),
        (["export", "OUT"], "a folder for the data set"),
        (["export", "OUT", "--out", "OUT2"], "no bag that can be read"),
        (["serve", "SESSION:reach", "SESSION:number"], "expected one service"),
    ],
)
def test_mistakes_are_told(words: list[str], hint: str, session: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = [word.replace("SESSION", session).replace("OUT", str(tmp_path / "out")) for word in words]
    assert main(["robot", *named, "--json"]) == 2
    assert hint in told(capsys)["error"]["message"]


@pytest.mark.parametrize(
    "words",
    [["robot", "replay", "x"], ["ros", "run", "--params", __file__], ["ros", "simulate", "--params", __file__]],
    ids=lambda words: " ".join(words[:2]),
)
def test_what_is_not_installed_is_named_with_its_extra(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rosbags", None)
    need_it = ("mmsdk.vla.record", "mmsdk.vla.ros.bag", "mmsdk.apps.robots.r", "rosbags.")
    for name in [name for name in sys.modules if name.startswith(need_it)]:
        monkeypatch.delitem(sys.modules, name)
    assert main([*words, "--json"]) == 2
    assert told(capsys)["error"] == {
        "type": "InputError",
        "message": f"{words[1]}: the package rosbags is not installed: pip install '.[ros]' in the clone",
        "item": words[1],
    }
