"""The scripts of examples/ run as they are: in one process, on mini's parts at a small size, with the real tokenizer."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mmsdk.apps.serve.server import serving
from mmsdk.apps.serve.service import Service
from mmsdk.apps.serve.settings import Settings
from mmsdk.compress import compression
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline, pipeline

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
Run = Callable[..., str]


@pytest.fixture
def run(small: Mini, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a script with words and gives what it printed."""

    def ran(name: str, *words: str) -> str:
        monkeypatch.setattr(sys.modules[pipeline.__module__], "open_model", lambda *asked: small)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return ran


def test_a_picture_is_answered_twice_alike(run: Run) -> None:
    whole, _, pieces = run("ask_picture").splitlines()
    assert whole.removeprefix("What is at the top? ") == pieces.replace("|", "") != ""


def test_an_error_stands_in_its_place(run: Run) -> None:
    scene, missing, motion = run("ask_batch").splitlines()
    assert re.fullmatch(r"scene\.png: What is at the top\? .+", scene) and re.fullmatch(r"motion\.mp4: What moves\? .+", motion)
    assert missing.startswith("missing.png: no answer: ") and "no such file" in missing


def test_a_clip_is_looked_at(run: Run) -> None:
    frames, asked, drawn = run("ask_clip").splitlines()
    assert re.fullmatch(r"4 frames, at (\d\.\d\d, ){3}\d\.\d\d s", frames)
    kept, all_of_them = map(int, re.findall(r"(\d+) of (\d+) visual", asked)[0])
    assert 2 * kept == all_of_them and drawn.split("? ")[1].strip()


def test_methods_keep_a_quarter(run: Run) -> None:
    _, *rows = run("compare_methods").splitlines()
    kept = {row.split()[0]: int(row.split()[1]) for row in rows}
    assert len(kept) == 5 and {name: count for name, count in kept.items() if count != kept["identity"] / 4} == {
        "identity": kept["identity"]
    }


def test_a_later_question_begins_where_the_earlier_one_did(run: Run) -> None:
    first, second = run("follow_up").splitlines()
    known, prompt = map(int, re.findall(r"(\d+) of (\d+)", second)[0])
    seeing = [float(ms) for line in (first, second) for ms in re.findall(r"(\d+) ms to see", line)]
    assert first.split()[0] == "0" and known > prompt / 2 and seeing[1] < seeing[0]


def test_requests_are_answered_together(run: Run) -> None:
    told = run("many_requests")
    ends = dict(re.findall(r"^(\d): .*?\[([^\]]*)\]$", told, re.MULTILINE | re.DOTALL))
    assert sorted(ends) == ["1", "2", "3", "4", "5"] and "missing.png" in ends.pop("5")
    assert set(ends.values()) <= {"stop", "length"} and "\n5 requests in " in told


def test_the_gate_has_the_last_word(run: Run) -> None:
    told = run("robot_loop")
    assert "asked for 10 rad/s, sent at most 1.50 rad/s; after the stop: emergency stop: somebody pressed it" in told
    assert "60 ticks" in told and "changed by the gate" in told


def test_a_robot_of_ones_own_is_driven_within_its_limits(run: Run) -> None:
    out = run("own_robot")
    assert "20 ticks" in out and float(out.rpartition("[")[2].split(",")[0]) <= 1.0


def test_openais_client_is_served(run: Run, small: Mini) -> None:
    with serving(Service(Pipeline(small, compression("uniform:0.5")), Settings())) as url:
        text, counts = run("openai_client", f"{url}/v1").splitlines()
    all_of_them, kept = map(int, re.findall(r"\d+", counts))
    assert text.strip() and 2 * kept == all_of_them


def test_every_script_is_run_here_and_told_of() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(SCRIPTS) >= 8 and all(f'run("{name}"' in tests and f"({name}.py)" in readme for name in SCRIPTS)
