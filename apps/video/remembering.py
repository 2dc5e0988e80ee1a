"""What a world's memory brings back of what left the view, beside a sliding window that reads as many pages.

Planted: pages of made keys, some asked for again by their own keys long after they left the window; the share of them that is read. It
needs no model. Returns: a trained model's window goes out of a drawn world and comes back (`mmsdk.apps.train_video.returning`). Endless: a
world that goes on, its frames' time and the process's memory at first and at last.
"""

import os
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm

from mmsdk.apps.train_video.learn import begun
from mmsdk.apps.train_video.returning import returned, ways
from mmsdk.apps.train_video.roam import ACTIONS, PIXELS, ROAMING, world_of
from mmsdk.apps.video.rows import Row, row
from mmsdk.apps.video.rows import seconds as timed
from mmsdk.diffusion.attention.types import Grid
from mmsdk.diffusion.imagine import Imaginer
from mmsdk.diffusion.types import Spot
from mmsdk.diffusion.world.door import EXACT, World
from mmsdk.diffusion.world.memory import Paging, WorldMemory
from mmsdk.diffusion.world.model import WorldModel, open_world_model

__all__ = ["endless", "planted", "returns"]

_READ = 7  # pages that are read at one time, and with the new one what the fast tier holds
MEMORIES = {
    "pages": Paging(sinks=1, recent=2, recalled=4, fast=_READ + 1, host=8),
    "window": Paging(sinks=0, recent=_READ, recalled=0, fast=_READ + 1, host=8),
}
_TOKENS, _SIDE, _HEADS, _EVERY = 16, 32, 2, 5


def planted(frames: int, seed: int) -> Iterator[Row]:
    """Every fifth page has keys around a direction of its own; each is asked for at the end by that direction.

    `recall` is the share whose values come back, of all and of those that left a window; seconds are those of a question.
    """
    for name, paging in MEMORIES.items():
        with TemporaryDirectory() as folder, WorldMemory(Path(folder), paging, EXACT) as memory:
            directions = _written(memory, frames, seed)
            spot = _spot()
            found, begun = list[bool](), time.perf_counter()
            for number, direction in enumerate(tqdm(directions, desc=f"planted, {name}", unit="page", mininterval=2)):
                query = (8 * direction).expand(1, _HEADS, _TOKENS, _SIDE)
                out = memory.at(0, 1, "cond")(query, 0 * query, 0 * query, spot)
                found.append(bool((out.mean(-1) - (number + 1)).abs().max() < 0.5))
            took = (time.perf_counter() - begun) / len(found)
            gone = [hit for number, hit in enumerate(found) if _EVERY * number < frames - _READ]
            yield _told("planted " + name, frames * _TOKENS, sum(found) / len(found), took) | {
                "recall_of_gone": sum(gone) / max(1, len(gone)),
                "pages_read": _READ,
            }


def returns(model: Path, clips: int) -> Iterator[Row]:
    """A trained model's: the share of the first frame's error against bare ground that is gone when the window is back."""
    for name, paging in MEMORIES.items():
        for waiting in (0, 16):
            begun = time.perf_counter()
            with TemporaryDirectory() as folder:
                found = returned(model, clips, paging, waiting, folder=Path(folder))
            frames = len(ways(0, waiting)) + 1
            took = (time.perf_counter() - begun) / (clips * frames)
            told = {"pages_read": _READ, "clips": clips}
            yield _told(f"returns {name}, after {frames} frames", frames * (PIXELS // 4) ** 2, found.recall, took) | told


def endless(model: Path | None, frames: int, seed: int) -> Iterator[Row]:
    """Rows of the first and the last tenth of so many frames of a random walk: seconds of a frame, MB of the process, pages of a layer.

    Without a model it is one of the default sizes that was taught nothing: time and memory are the same.
    """
    opened, draw = _untaught(seed) if model is None else open_world_model(model), torch.Generator().manual_seed(seed)
    actions = [list(ACTIONS)[number] for number in torch.randint(0, len(ACTIONS), (frames,), generator=draw).tolist()]
    part, took = max(2, frames // 10), list[float]()
    with TemporaryDirectory() as folder, World(opened, pages=MEMORIES["pages"], folder=Path(folder)) as world:
        world.reset(seed, text="a red ball")
        for number, action in enumerate(tqdm(actions[1:], desc="endless", unit="frame", mininterval=2), start=2):
            took.append(timed(partial(world.step, action)))
            if number in (part, frames):
                fast, host, disk = world.resident[0]
                told: Row = {"memory_mb": _resident_mb(), "fast_pages": fast, "host_pages": host, "disk_pages": disk}
                name = f"endless, frames {number - part + 1} to {number}"
                yield row("world", name, number * (PIXELS // 4) ** 2) | {"seconds": statistics.mean(took[-part:])} | told


def _untaught(seed: int) -> WorldModel:
    model, words = begun(ROAMING, seed)
    return world_of(Imaginer(model.eval().requires_grad_(False), words.requires_grad_(False)))


def _resident_mb() -> float:
    """Memory of the process now; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _told(method: str, tokens: int, recall: float, took: float) -> Row:
    return row("world", method, tokens) | {"recall": recall, "seconds": took}


def _spot() -> Spot:
    return Spot(Grid(1, 4, _TOKENS // 4), 0, 1, torch.empty(_HEADS, _SIDE, _SIDE))


def _written(memory: WorldMemory, frames: int, seed: int) -> list[torch.Tensor]:
    """Pages of noise, every fifth with keys around a direction and values that number it; the directions."""
    draw, directions = torch.Generator().manual_seed(seed), list[torch.Tensor]()
    shape = (1, _HEADS, _TOKENS, _SIDE)
    for frame in range(frames):
        keys, values = 0.3 * torch.randn(shape, generator=draw), torch.zeros(shape)
        if frame % _EVERY == 0:
            direction = torch.randn(_SIDE, generator=draw)
            directions.append(direction / direction.norm() * 6)
            keys, values = keys + directions[-1], torch.full(shape, float(len(directions)))
        memory.writing("cond")(torch.zeros(shape), keys, values, _spot())
    return directions
