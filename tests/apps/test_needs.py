"""What training needs beside Python packages: where it is missing the message names the fix, before any work and without a traceback."""

import json
import sys
from pathlib import Path

import pytest

from mmsdk.apps.cli import main as mmsdk
from mmsdk.apps.train_mini.__main__ import main as train
from mmsdk.apps.train_mini.needs import check_compiling, check_rendering, compiler, osmesa
from mmsdk.apps.train_mini.renders import _run, render
from mmsdk.errors import InputError


@pytest.fixture
def screenless(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyOpenGL told to draw by other means, so that MuJoCo gets no OSMesa, as where its library is not installed."""
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setenv("PYOPENGL_PLATFORM", "egl")


def told(capfd: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr, of this process and of those that it started."""
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error, error
    return error


@pytest.mark.usefixtures("screenless")
def test_without_osmesa_rendering_says_how_to_have_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rendering: MuJoCo cannot draw without a screen here: apt install libosmesa6 \(it said: .+\)"):
        render(tmp_path / "renders", images=1, clips=1, seed=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("screenless")
def test_training_ends_with_that_line_before_anything_is_drawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(["--folder", str(tmp_path / "run"), "--no-compile"]) == 2
    assert "apt install libosmesa6" in told(capfd) and not list(tmp_path.iterdir())


@pytest.mark.usefixtures("screenless")
def test_the_bench_ends_with_that_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert mmsdk(["bench", "mini:renders=1"]) == 2
    assert "apt install libosmesa6" in told(capfd)


def test_another_way_of_drawing_that_fails_is_to_be_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "crayons")
    with pytest.raises(InputError, match=r"unset MUJOCO_GL and apt install libosmesa6 \(it said: RuntimeError: invalid value .*crayons\)"):
        check_rendering()


@pytest.mark.parametrize("package", ["metaworld", "gymnasium_robotics"])
def test_without_a_simulator_the_extra_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf'{package} is not installed: pip install "\.\[robots\]" in the clone'):
        check_rendering()


def test_a_suite_that_fails_is_an_error_of_one_line() -> None:
    with pytest.raises(InputError, match="rendering billiards: its program ended with exit code 1; what it said stands above"):
        _run("billiards", [])


def test_without_a_compiler_training_says_how_to_do_with_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "c++-that-is-not-there")
    with pytest.raises(InputError, match=r"c\+\+-that-is-not-there: there is no such C\+\+ compiler"):
        check_compiling()
    assert train(["--folder", str(tmp_path / "run"), "--device", "cpu"]) == 2
    assert "apt install g++, or --no-compile" in told(capfd) and not list(tmp_path.iterdir())


def test_the_doctor_tells_of_both(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for there in (True, False):
        if not there:
            monkeypatch.setenv("CXX", "c++-that-is-not-there")
            monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
        assert mmsdk(["doctor", "--json"]) in (0, 1)
        findings = {one["what"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
        for what, found, fix in (("osmesa", osmesa(), "apt install libosmesa6"), ("c++ compiler", compiler(), "apt install g++")):
            state, detail = findings[what]["state"], findings[what]["detail"]
            assert (state == "ok" and detail == found) if found else (state == "absent" and detail.endswith(fix))
    assert osmesa() is None is compiler()
