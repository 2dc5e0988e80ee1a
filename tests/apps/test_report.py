"""Where a number comes from: the commit of a real clone, and whether the files are still those of it."""

import subprocess
from pathlib import Path

import pytest

from mmsdk.apps.report import commit


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.invalid"]
    return subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository of two commits, with a source file and a kept result."""
    git(tmp_path, "init", "--quiet")
    for name in ("code.py", "benchmarks/results/startup.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first")
        git(tmp_path, "add", name)
        git(tmp_path, "commit", "--quiet", "--message", name)
    return tmp_path


def test_a_clean_clone_is_its_commit(clone: Path) -> None:
    assert commit(clone) == git(clone, "rev-parse", "HEAD")[:12]


@pytest.mark.parametrize("name", ["code.py", "new.py", "folder/new.py"])
def test_changed_and_new_files_mark_it(clone: Path, name: str) -> None:
    (clone / name).parent.mkdir(exist_ok=True)
    (clone / name).write_text("second")
    assert commit(clone) == git(clone, "rev-parse", "HEAD")[:12] + "-dirty"
    git(clone, "add", name)
    assert commit(clone).endswith("-dirty")
    git(clone, "commit", "--quiet", "--message", "second")
    assert commit(clone) == git(clone, "rev-parse", "HEAD")[:12]


@pytest.mark.parametrize("name", ["startup.json", "mini.json"])
def test_the_result_that_is_being_written_does_not(clone: Path, name: str) -> None:
    (clone / "benchmarks" / "results" / name).write_text("")
    assert commit(clone) == git(clone, "rev-parse", "HEAD")[:12]


def test_what_is_no_clone_has_no_commit(tmp_path: Path, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit(tmp_path / "nowhere") == ""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert commit(clone) == ""
