"""`mmsdk robot serve`: a real process on a free port, asked over a real socket and ended by Ctrl-C."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mmsdk.apps.cli import main
from mmsdk.errors import WireError
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.envs.planar_arm import PlanarArm, planar_contract
from mmsdk.vla.types import Request
from mmsdk.vla.wire.client import RemotePolicy

SERVED = '''
import time
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


def slow():
    class Slow(Stay):
        def __call__(self, request):
            Path(__file__).with_name("begun").touch()
            time.sleep(600)

    return Service(planar_contract("position"), Slow)


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
        assert running.wait(20) == 0, running.stderr.read()
        assert json.loads(running.stdout.read()) == {"clients": 3, "answered": 3, "late": 0, "refused": 0, "failed": 0}
        assert running.stderr.read() == ""
    assert served.with_name("loaded").read_text(encoding="utf-8") == "weights"


def test_a_second_ctrl_c_does_not_wait_for_the_policy(served: Path) -> None:
    robot = PlanarArm(planar_contract("position"), SimulatedClock())

    def ask(url: str) -> None:
        with RemotePolicy(url, robot.contract) as remote:
            remote(Request(robot.observe(), torch.zeros(0, 3)))

    with process(f"{served}:slow") as running, ThreadPoolExecutor(1) as pool:
        assert running.stdout is not None and running.stderr is not None
        url = json.loads(running.stdout.readline())["url"]
        asked = pool.submit(ask, url)
        assert comes(served.with_name("begun").exists)
        running.send_signal(signal.SIGINT)
        # the first signal has been heard when nobody is let in any more
        assert comes(lambda: refuses(url))
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130 and running.stderr.read() == "\ninterrupted\n"
        assert isinstance(asked.exception(60), WireError)


def comes(condition: Callable[[], bool]) -> bool:
    """Whether something is so within some seconds."""
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def refuses(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))).close()
    except OSError:
        return True
    return False


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["SERVED"], "names no function; write: mmsdk robot serve FILE.py:NAME"),
        (["SERVED:"], "names no function"),
        (["SERVED:arms"], "no function 'arms' in .*; there is arm, slow, number"),
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
