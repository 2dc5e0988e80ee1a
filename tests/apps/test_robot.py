"""`mmsdk robot serve`: a real process on a free port, asked over a real socket and ended by Ctrl-C."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mmsdk.apps.cli import main
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.envs.planar_arm import PlanarArm, planar_contract
from mmsdk.vla.types import Request
from mmsdk.vla.wire.client import RemotePolicy

SERVED = '''
from pathlib import Path

from mmsdk.vla.envs.planar_arm import planar_contract
from mmsdk.vla.types import ActionChunk
from mmsdk.vla.wire.service import Service


class Stay:
    """Stay where you are."""

    def reset(self, episode):
        pass

    def __call__(self, request):
        return ActionChunk(request.observation.state.repeat(4, 1), request.observation.stamp, "stay")


def arm():
    with Path(__file__).with_name("loaded").open("a") as log:
        log.write("weights")
    policy = Stay()
    return Service(planar_contract("position"), lambda: policy)


def number():
    return 3
'''


@pytest.fixture
def served(tmp_path: Path) -> Path:
    path = tmp_path / "served.py"
    path.write_text(SERVED, encoding="utf-8")
    return path


@contextmanager
def process(service: str, port: str = "0") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "mmsdk.apps.cli", "robot", "serve", service, "--port", port, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def test_vr_19_clients_come_and_go_weights_are_loaded_once_and_ctrl_c_ends_it_in_order(served: Path) -> None:
    robot = PlanarArm(planar_contract("position"), SimulatedClock())
    with process(f"{served}:arm") as running:
        assert running.stdout is not None and running.stderr is not None
        ready = json.loads(running.stdout.readline())
        assert ready["robot"] == "planar arm"
        for _ in range(3):
            with RemotePolicy(ready["url"], robot.contract) as remote:
                seen = robot.observe()
                chunk = remote(Request(seen, torch.zeros(0, 3)))
                assert torch.equal(chunk.actions, seen.state.repeat(4, 1)) and chunk.producer == "stay"
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 0
        assert json.loads(running.stdout.read()) == {"clients": 3, "answered": 3, "late": 0, "refused": 0, "failed": 0}
        assert running.stderr.read() == ""
    assert served.with_name("loaded").read_text(encoding="utf-8") == "weights"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["SERVED"], "names no function; write: mmsdk robot serve FILE.py:NAME"),
        (["SERVED:"], "names no function"),
        (["SERVED:arms"], "no function 'arms' in .*; there is arm, number"),
        (["SERVED:number"], "gave a int, expected a Service"),
        (["missing.py:arm"], "no such file"),
        (["no_such_module:arm"], "no module of that name"),
        (["SERVED:arm", "--port", "70000"], "is no port"),
        (["SERVED:arm", "--api-key-file", "missing"], "cannot be read"),
        (["SERVED:arm", "--hots", "x"], "did you mean '--host'"),
        ([], "are required"),
    ],
)
def test_mistakes_are_told_in_one_line(served: Path, words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["robot", "serve", *(word.replace("SERVED", str(served)) for word in words), "--json"]) == 2
    shown = capsys.readouterr()
    error = json.loads(shown.out)["error"]
    assert shown.err.count("\n") == 1
    with pytest.raises(ValueError, match=hint):
        raise ValueError(error["message"])


def test_a_port_that_is_taken_is_told(served: Path) -> None:
    with process(f"{served}:arm") as first:
        assert first.stdout is not None
        port = json.loads(first.stdout.readline())["url"].rpartition(":")[2]
        with process(f"{served}:arm", port) as second:
            assert second.wait(60) == 1 and second.stderr is not None
            assert "address already in use" in second.stderr.read()
