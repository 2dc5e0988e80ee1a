"""Labelled pictures and clips of robot simulators: Meta-World's 50 tasks and the Fetch arm, each thing with its name, colour and place.

`render` fills a folder: images.npy (uint8 n, size, size, 3), images.json, clips.npy (uint8 m, 8, size, size, 3), clips.json. Each task of a
suite is a part on disk, so that a run that was cut goes on where it stopped; the suites run in processes of their own, one after the other.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import mmsdk
from mmsdk.apps.train_mini.needs import check_rendering, screenless
from mmsdk.errors import InputError

__all__ = ["render"]


def render(folder: Path, *, images: int, clips: int, seed: int, size: int = 224, progress: bool = True) -> None:
    """Fill `folder` with `images` pictures and `clips` clips of `size` x `size`, the same ones for the same seed.

    One in six pictures and three in 28 clips show the Fetch arm, the others Meta-World. Seeds from 10,000 on are meant as held out.
    Raises InputError for counts that are not positive, where rendering lacks something (the message says what to install), and where a
    suite fails, which then has said why.
    """
    if images < 1 or clips < 1 or size < 32:
        raise InputError(f"images={images}, clips={clips}, size={size}: expected at least 1, 1 and 32", item="render")
    check_rendering()
    parts = folder / "parts" / f"{seed}-{size}-{images}-{clips}"
    fetch = (images // 6, clips * 3 // 28)
    for suite, share in {"metaworld": (images - fetch[0], clips - fetch[1]), "fetch": fetch}.items():
        if share != (0, 0):
            _run(suite, [str(parts.resolve()), *map(str, (*share, seed, size, int(progress)))])
    paths = sorted(parts.glob("*.npz"))
    for key in ("images", "clips"):
        _gather(paths, key, folder, seed)


def _run(suite: str, arguments: Sequence[str]) -> None:
    """One suite in a process of its own, off screen."""
    command = [sys.executable, "-m", f"mmsdk.apps.train_mini.renders_{suite}", *arguments]
    done = subprocess.run(command, check=False, env=screenless(), cwd=Path(mmsdk.__file__).parents[1])
    if done.returncode:
        raise InputError(f"its program ended with exit code {done.returncode}; what it said stands above", item=f"rendering {suite}")


def _gather(paths: Sequence[Path], key: str, folder: Path, seed: int) -> None:
    """All parts' pictures or clips to one array and one list, shuffled, so that any prefix is a fair sample."""
    rows: list[object] = []
    blocks: list[np.ndarray] = []
    for path in paths:
        with np.load(path) as part:
            rows += json.loads(str(part["labels"]))[key]
            blocks += [part[key]] if len(part[key]) else []
    order = np.random.default_rng(seed).permutation(len(rows))
    place = np.argsort(order)
    rough = folder / f"{key}.tmp"  # whoever has the old file mapped keeps it whole
    out = np.lib.format.open_memmap(rough, "w+", np.uint8, (len(rows), *blocks[0].shape[1:]))
    for block, start in zip(blocks, np.cumsum([0, *map(len, blocks)]), strict=False):
        out[place[start : start + len(block)]] = block
    out.flush()
    rough.replace(folder / f"{key}.npy")
    (folder / f"{key}.json").write_text(json.dumps([rows[i] for i in order]))
