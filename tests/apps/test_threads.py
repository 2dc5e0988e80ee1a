"""`--threads`: how many threads compute, in torch, in threads that are begun later, and in our own C++."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from mmsdk.apps import speed
from mmsdk.apps.cli import main

SEEN = """
import ctypes, json, sys, threading
from mmsdk.apps.arguments import COMMANDS
from mmsdk.apps.threads import limit
limit(1)
assert "torch" not in sys.modules
import torch
found = []
openmp = ctypes.CDLL("libgomp.so.1")
look = lambda: found.append([torch.get_num_threads(), openmp.omp_get_max_threads()])
look()
for work in (threading.Thread(target=look),):
    work.start(), work.join()
print(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings GCC's OpenMP under this name on Linux")
@pytest.mark.parametrize("others", [{}, {"MKL_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}])
def test_the_number_holds_in_torch_in_other_threads_and_in_openmp(others: dict[str, str]) -> None:
    """The library of our own C++ asks the OpenMP that torch brings."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")} | others
    told = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True, check=True, env=environment).stdout
    assert json.loads(told) == [[1, 1], [1, 1]]


def test_a_command_of_a_program_that_has_torch_already_takes_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--threads", "3", "--json"]) == 0
    assert torch.get_num_threads() == 3 and json.loads(capsys.readouterr().out)["benches"]


@pytest.mark.parametrize("number", ["-1", "100000"])
def test_a_number_that_cannot_be_is_told(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    assert main(["bench", "--threads", number]) == 2
    assert "--threads: it is" in capsys.readouterr().err and torch.get_num_threads() == before


@pytest.mark.parametrize(("running", "advised"), [(0.2, False), (1.2, True), (4.0, True)])
def test_the_doctor_says_how_many_are_worth_trying(
    running: float, advised: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (running, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    torch.set_num_threads(2)
    main(["doctor", "--json"])
    (detail,) = [one["detail"] for one in json.loads(capsys.readouterr().out)["findings"] if one["what"] == "load"]
    assert ("mmsdk ask --threads 1 ..., or OMP_NUM_THREADS=1 mmsdk ..." in detail) == advised
