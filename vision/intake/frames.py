"""A clip given as its frames: what it may be, which frames are taken, when each is shown, and what was noted of them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.intake.arrays import Array
from mmsdk.vision.intake.source import Frame, named_unreadable
from mmsdk.vision.sampling import UNSEEN, Sampling
from mmsdk.vision.values import brief, real, shown

__all__ = ["Frames", "check_times", "counted", "noted", "timed"]

# Clips keep their times in 32 bits.
LATEST = torch.finfo(torch.float32).max
LISTED = 8


@dataclass(frozen=True, slots=True)
class Frames:
    """A clip given as its frames: with `times` in seconds they are all taken as they are, otherwise they are sampled at `fps`."""

    pictures: Sequence[Frame] | Array | Tensor
    times: Sequence[float] = ()
    fps: float = 1.0

    def __repr__(self) -> str:
        return brief(self)


def counted(clip: Frames) -> int:
    """How many frames there are. Raises InputError for none, and for what would be taken apart into something else: a name into letters."""
    pictures = clip.pictures
    if isinstance(pictures, Tensor) and pictures.is_nested:
        raise InputError("a nested tensor is no clip; pass the list of its parts, pictures.unbind()", item="frames")
    if isinstance(pictures, np.ndarray | Tensor):
        if pictures.ndim != 4:
            raise InputError(f"an array of shape {tuple(pictures.shape)} is no clip; expected t h w c or t c h w", item="frames")
    elif isinstance(pictures, str | bytes | bytearray | memoryview) or not isinstance(pictures, Sequence):
        told = f"expected a list of pictures or an array, not {type(pictures).__name__}"
        raise InputError(f"{told}; mmsdk.load_video reads files", item="frames")
    # the sequence may be the caller's own
    with named_unreadable("frames"):
        count = len(pictures)
    if count == 0:
        raise InputError("there are no frames in it", item="frames")
    return count


def timed(
    clip: Frames, count: int, sampling: Sampling, changes: Callable[[], npt.NDArray[np.float64]]
) -> tuple[list[int], Float[Tensor, " t"]]:
    """Which of `count` frames are taken, and the second at which each is shown; `changes` scores all of them, where that is asked for.

    Raises InputError for times that are not one finite number a frame, each after the one before, and for a rate that gives no such times.
    """
    given, rate = _given(clip.times, count), real(clip.fps)
    if not (0 < rate < math.inf and count / rate <= LATEST):
        raise InputError(f"fps is {shown(clip.fps)}, expected a number well above 0, such as 2.0", item="frames")
    scored = UNSEEN if given or sampling.scenes is None else changes()
    taken = list(range(count)) if given else sampling.indices(count, rate, scored)
    return taken, _rising(given or [index / rate for index in taken])


def check_times(times: object, count: int, item: str) -> None:
    """Raise InputError where a clip that a program made itself has not one finite time for each of `count` frames, all of them rising."""
    if not isinstance(times, Tensor) or times.shape != (count,) or not times.is_floating_point() or times.is_meta:
        told = f"{times.dtype} of shape {tuple(times.shape)}" if isinstance(times, Tensor) else shown(times)
        raise InputError(f"times is {told}, expected a tensor of {count} floats, the seconds of each frame", item=item)
    if not bool(times.isfinite().all() and (times.diff() > 0).all()):
        raise InputError(f"times is {shown(times.tolist())}, expected finite, rising seconds", item=item)


def noted(notes: Sequence[tuple[str, ...]], frames: Sequence[int]) -> tuple[str, ...]:
    """The notes on each of these frames as those of their clip: each once, with the numbers of its frames where it is not on all."""
    found: dict[str, list[int]] = {}
    for index, said in zip(frames, notes, strict=True):
        for note in said:
            found.setdefault(note, []).append(index)
    return tuple(note if len(where) == len(frames) else f"frame {_listed(where)}: {note}" for note, where in found.items())


def _given(times: object, count: int) -> list[float]:
    """The seconds of each frame as floats, or nothing where there are none."""
    alone = isinstance(times, np.ndarray | Tensor) and times.ndim == 0
    if alone or isinstance(times, str | bytes | Mapping | Set) or not isinstance(times, Iterable):
        raise InputError(f"times is {shown(times)}, expected a list of seconds, one for each frame, or () for none", item="frames")
    with named_unreadable("frames"):
        # one more than wanted tells too many, also of what never ends
        values = list(islice(times, count + 1))
    if values and len(values) != count:
        told = f"more than {count}" if len(values) > count else len(values)
        raise InputError(f"{told} times for {count} frames, expected one each", item="frames")
    seconds = [real(value) for value in values]
    for index, second in enumerate(seconds):
        if not abs(second) <= LATEST:
            raise InputError(f"time {index} is {shown(values[index])}, expected a finite number of seconds", item="frames")
    return seconds


def _rising(seconds: Sequence[float]) -> Float[Tensor, " t"]:
    kept = torch.tensor(seconds, dtype=torch.float64).float()
    for at in (kept.diff() <= 0).nonzero()[:1, 0].tolist():
        before, after = seconds[at], seconds[at + 1]
        told = f"{after:.9g} s comes after {before:.9g} s, expected rising times"
        fix = "; 32 bits do not tell these apart: count from the first frame, and in seconds" if before < after else ""
        raise InputError(told + fix, item="frames")
    return kept


def _listed(frames: Sequence[int]) -> str:
    left = len(frames) - LISTED
    return ", ".join(map(str, frames[:LISTED])) + (f" and {left} more" if left > 0 else "")
