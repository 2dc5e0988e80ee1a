"""`mmsdk doctor` on the machine that the tests run on: what it measures, and what it says of packages that are there or not."""

import importlib.util
import json
import os
import time

import psutil
import pytest
import torch

from mmsdk.apps import speed
from mmsdk.apps.cli import main
from mmsdk.apps.speed import Speed, measured
from mmsdk.kv.room import memory_free

CPU = torch.device("cpu")


def findings(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    """What the doctor said, by what it is about."""
    return {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}


def test_the_machine_is_measured_in_short_time() -> None:
    begun = time.perf_counter()
    found = measured(CPU)
    # two seconds on a machine that does nothing else
    assert time.perf_counter() - begun < 6
    assert 1e8 < found.memory < 1e13 and set(found.products) == {"float32", "bfloat16"}
    assert all(1e8 < rate < 1e16 for rate in found.products.values())


def test_the_fastest_run_counts() -> None:
    waits = iter([0.0, 0.05, 0.01, 0.3])
    assert 0.01 <= speed._fastest(lambda: time.sleep(next(waits)), speed._nothing) < 0.05


def test_the_pace_is_what_memory_gives() -> None:
    assert Speed(10e9, {}).tokens(2e9) == 5.0


def test_free_memory_is_what_others_say_it_is() -> None:
    assert memory_free(CPU) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_what_is_measured_is_told_with_what_follows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    assert main(["doctor", "--json"]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    assert set(told["speed"]) == {"memory_gb_s", "float32_gflop_s", "bfloat16_gflop_s"} and all(rate > 0 for rate in told["speed"].values())
    detail = {finding["what"]: finding["detail"] for finding in told["findings"]}
    assert detail["speed of memory"] == f"{told['speed']['memory_gb_s']:.1f} GB/s are read"
    assert f"{told['speed']['memory_gb_s']:.0f} tokens a second of a model of 1 GB" in detail["pace"]
    assert f"{torch.get_num_threads()} threads" in detail["torch"] and "bfloat16" in detail["torch"] and "int4" in detail["largest model"]


@pytest.mark.parametrize("running", [0.1, 7.25])
def test_a_machine_that_is_busy_is_said_to_be_faster_alone(
    running: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (running, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    main(["doctor", "--json"])
    told = findings(capsys)
    assert f"{running:.1f} programs" in told["load"]["detail"] and ("alone it is faster" in told["load"]["detail"]) == (running > 1)
    assert "as memory was read just now" in told["pace"]["detail"]


def test_a_system_that_counts_no_load_is_said_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "getloadavg")
    assert speed.load() == 0


def test_a_package_of_an_extra_that_is_missing_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None if name == "metaworld" else real(name, package))
    main(["doctor", "--json"])
    told = findings(capsys)["extra robots"]
    assert told["state"] == "absent"
    assert told["detail"] == 'optional, for robots in simulators (metaworld is missing): pip install ".[robots]" in the clone'


def test_a_package_that_is_there_tells_its_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    main(["doctor", "--json"])
    assert findings(capsys)["extra dev"]["detail"].startswith(f"pytest {pytest.__version__}, hypothesis ")
