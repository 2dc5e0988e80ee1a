"""make sets up what it needs from nothing, mends what was interrupted, does it once, and removes what it made and nothing else.

The interpreter here is a script that notes how it is called: what is tested is make's own part, and a real set-up downloads gigabytes.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = ["build/check", "build/lib", "build/bdist.linux-x86_64"]
ANSWERED = 'answered\nask about your own: .venv/bin/mmsdk ask PATH... "question"\n'
PYTHON = """#!/bin/sh
echo "$*" >> calls
case "$*" in
    *version_info*) exit ${OLD:-0} ;;
    *"import ensurepip"*) case "$0" in *bare*) exit 1 ;; esac ;;
    "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python && touch .venv/bin/activate ;;
    *"pip --version"*) exit 0 ;;
    *install*)
        echo "Collecting torch"
        echo "  Downloading https://mirror.invalid/torch-2.13.whl.metadata (28 kB)"
        echo "  Downloading https://mirror.invalid/torch-2.13.whl (191.8 MB)"
        echo "Downloading small-1.0.whl (9.9 MB)"
        echo "Installing collected packages: mpmath, torch, mmsdk"
        test -z "$OFFLINE" && printf '#!/bin/sh\\necho answered' > .venv/bin/mmsdk && chmod +x .venv/bin/mmsdk ;;
esac
"""


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A clean clone as far as make looks at it, and two interpreters beside it, one of them without the means to make an environment."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt", "calls"):
        (tmp_path / name).touch()
    for name in ("whole", "bare"):
        (tmp_path / name).write_text(PYTHON)
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.fixture
def tree(bare: Path) -> Path:
    """The same with a finished `.venv`, leftovers of a build, and a training run."""
    for folder in (".venv/bin", "build/train_mini", *MADE):
        (bare / folder).mkdir(parents=True)
    (bare / "build" / "train_mini" / "checkpoint.safetensors").write_bytes(b"a night of work")
    shutil.copy(bare / "whole", bare / ".venv" / "bin" / "python")
    for name in (".venv/bin/activate", ".venv/core", ".venv/dev"):
        (bare / name).touch()
    return bare


def make(folder: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    # the tests themselves are run by make, whose flags are not meant for this one
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES")}
    return subprocess.run(["make", *words], cwd=folder, env=outside | settings, capture_output=True, text=True, check=False)


def calls(folder: Path, word: str) -> int:
    """How often the interpreter was called with this word, since the last time this was asked."""
    lines = (folder / "calls").read_text().splitlines()
    (folder / "calls").write_text("")
    return sum(word in line for line in lines)


def test_a_python_that_is_too_old_is_told_with_what_was_looked_for(bare: Path) -> None:
    done = make(bare, "PYTHON=./whole ./nowhere", "demo", OLD="1")
    assert done.returncode != 0 and "Python 3.11 or newer" in done.stderr and "./whole ./nowhere" in done.stderr
    assert not (bare / ".venv").exists()


def test_a_python_that_can_make_no_environment_is_passed_over_or_told(bare: Path) -> None:
    done = make(bare, "PYTHON=./bare", "demo")
    assert done.returncode != 0 and "apt install python3-venv" in done.stderr and not (bare / ".venv").exists()
    assert make(bare, "PYTHON=./bare ./whole", "demo").stdout.endswith(ANSWERED)


def test_the_second_run_sets_nothing_up_and_a_changed_project_only_installs(bare: Path) -> None:
    assert make(bare, "PYTHON=./whole", "demo").stdout.endswith(ANSWERED)
    assert calls(bare, "") > 0
    assert make(bare, "demo").stdout == ANSWERED
    assert calls(bare, "") == 0
    later = (bare / ".venv" / "core").stat().st_mtime + 5
    os.utime(bare / "pyproject.toml", (later, later))
    assert make(bare, "demo").returncode == 0
    lines = (bare / "calls").read_text()
    assert "install" in lines and "-m venv" not in lines


@pytest.mark.parametrize("left", ["a python without its pip", "a link to a python that is gone"])
def test_what_an_interrupted_set_up_left_is_made_anew(bare: Path, left: str) -> None:
    python = bare / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    if left.startswith("a link"):
        python.symlink_to(bare / "gone")
        for name in (".venv/bin/activate", ".venv/core"):
            (bare / name).touch()
    else:
        shutil.copy(bare / "whole", python)
    done = make(bare, "PYTHON=./whole", "demo")
    assert done.stdout.endswith(ANSWERED), done.stderr
    assert calls(bare, "-m venv") == 1


def test_a_download_that_fails_says_what_to_do_and_the_next_run_goes_on(bare: Path) -> None:
    done = make(bare, "PYTHON=./whole", "demo", OFFLINE="1")
    assert done.returncode != 0 and "Check the network" in done.stderr and "run make again" in done.stderr
    assert calls(bare, "-m venv") == 1
    assert make(bare, "PYTHON=./whole", "demo").stdout.endswith(ANSWERED)
    assert calls(bare, "-m venv") == 0


def test_where_no_terminal_shows_progress_each_long_step_is_a_short_line_with_its_time_and_size(bare: Path) -> None:
    done = make(bare, "PYTHON=./whole", "demo")
    assert done.returncode == 0, done.stderr
    lines = [re.sub(r"^  \d+ s", "  N s", line) for line in done.stdout.splitlines()]
    assert max(map(len, lines)) <= 160
    said = "installing mmsdk[robots] into .venv: about 0.5 GB to download"
    begun = next(number for number, line in enumerate(lines) if line.startswith(said))
    assert lines[begun + 1 : begun + 3] == ["  N s: downloading torch-2.13.whl (191.8 MB)", "  N s: unpacking 3 packages"]
    assert re.fullmatch(r"  N s: \.venv is ready and holds [\d.,]+[KMG]?", lines[begun + 3])
    assert "\n".join(lines[begun + 4 :]) + "\n" == ANSWERED


def test_an_environment_of_an_older_python_is_told_and_left(bare: Path) -> None:
    assert make(bare, "PYTHON=./whole", "demo").returncode == 0
    (bare / ".venv" / "core").unlink()
    done = make(bare, "demo", OLD="1")
    assert done.returncode != 0 and "older than 3.11" in done.stderr and (bare / ".venv" / "bin" / "python").exists()


@pytest.mark.parametrize("target", ["build/check", "clean"])
def test_what_training_made_stays_and_what_a_build_left_goes(tree: Path, target: str) -> None:
    done = make(tree, "--old-file=.venv/dev", target)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tree / "build" / "train_mini" / "checkpoint.safetensors").read_bytes() == b"a night of work"
    assert not [name for name in MADE if (tree / name).exists()]
