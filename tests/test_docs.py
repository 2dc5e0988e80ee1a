"""The Python of the README, the guide and more pages runs as it is written, in one session, on the model as it ships."""

import functools
import inspect
import re
import shutil
import sys
from pathlib import Path

import PIL.Image
import pytest

import mmsdk
from mmsdk.families import open_model
from mmsdk.pipeline import Pipeline
from mmsdk.weights.bundle import Bundle

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/quickstart.md", "docs/guide.md", "docs/chat.md", "docs/memory.md")  # in which Python is run
WRITTEN = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)


def blocks(page: str) -> list[str]:
    """The Python of a page, one text a block."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that the pages name; answers are short where a page does not say how long they may be.

    Each page opens a pipeline of its own; the model itself is opened once.
    """
    for name, colour in (("photo.jpg", "red"), ("a.jpg", "green"), ("b.png", "blue")):
        PIL.Image.new("RGB", (96, 64), colour).save(tmp_path / name)
    shutil.copy(ROOT / "apps" / "media" / "motion.mp4", tmp_path / "clip.mp4")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules[Pipeline.__module__], "open_model", functools.cache(open_model))
    for method in (Pipeline.__call__, Pipeline.stream):
        monkeypatch.setitem(inspect.unwrap(method).__kwdefaults__, "max_tokens", 4)
    return tmp_path


def test_every_block_runs(folder: Path, mini_bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    session: dict[str, object] = {}
    for page in PAGES:
        for number, block in enumerate(blocks(page)):
            exec(compile(block, f"{page}, block {number}", "exec"), session)
    answers = session["answers"]
    assert isinstance(answers, list) and len(answers) == 2 and all(isinstance(answer, mmsdk.Answer) for answer in answers)
    assert "no answer: item 2 (index 1, missing.png)" in capsys.readouterr().out


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in WRITTEN:
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            assert "://" in target or ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_every_command_of_the_pages_is_one() -> None:
    known = {path.stem for path in (ROOT / "apps" / "commands").glob("[a-z]*.py")}
    told = {
        word for page in WRITTEN for word in re.findall(r"^    mmsdk ([a-z]+)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {"ask", "demo", "doctor", "weights"} <= told <= known
