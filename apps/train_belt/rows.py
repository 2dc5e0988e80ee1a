"""The rows of the suites "moving-belt" and "cue", from a process of their own, which draws off screen."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

import mmsdk
from mmsdk.apps.console import Cell
from mmsdk.apps.train_mini.needs import check_rendering, screenless
from mmsdk.errors import InputError
from mmsdk.vla.memory.dual import Ablation

__all__ = ["SHIPPED", "Suite", "rows"]

Suite = Literal["moving-belt", "cue"]
SHIPPED = Path(__file__).parent


def rows(
    suite: str, episodes: int = 100, conditions: Sequence[Ablation] = get_args(Ablation), folder: Path = SHIPPED
) -> Iterator[dict[str, Cell]]:
    """The rows of a suite, "moving-belt" or "cue", one for each condition.

    Raises InputError for another suite, where the folder holds no trained policy of a condition, and where simulations cannot be drawn here
    (the message names the fix).
    """
    if suite not in get_args(Suite):
        raise InputError(f"there is no {suite!r}; there is {', '.join(get_args(Suite))}", item="suite")
    if absent := [condition for condition in conditions if not (folder / f"{condition}.safetensors").is_file()]:
        raise InputError(f"no {', '.join(absent)}.safetensors; train it: python -m mmsdk.apps.train_belt", item=str(folder))
    check_rendering()
    command = [sys.executable, "-m", "mmsdk.apps.train_belt.trial", str(folder.resolve()), suite, str(episodes), *conditions]
    root = Path(mmsdk.__file__).parents[1]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=screenless(), cwd=root) as process:
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise InputError(f"its program ended with exit code {process.returncode}; what it said stands above", item=f"suite {suite}")
