"""make removes what it made and nothing else: training keeps its shards and checkpoints under build/, too."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = ["build/check", "build/lib", "build/bdist.linux-x86_64"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The Makefile in a tree with a finished `.venv` (whose Python does nothing), leftovers of a build, and a training run."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in (".venv/bin", "build/train_mini", *MADE):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "build" / "train_mini" / "checkpoint.safetensors").write_bytes(b"a night of work")
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt", ".venv/core", ".venv/dev"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("target", ["build/check", "clean"])
def test_what_training_made_stays_and_what_a_build_left_goes(tree: Path, target: str) -> None:
    done = subprocess.run(["make", "--old-file=.venv/dev", target], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tree / "build" / "train_mini" / "checkpoint.safetensors").read_bytes() == b"a night of work"
    assert not [name for name in MADE if (tree / name).exists()]
