"""A recording's ticks as the frames of demonstrations: what was seen, and the command that was then sent."""

import torch

from mmsdk.vla.lerobot.writer import DatasetWriter
from mmsdk.vla.record.replay import Tape
from mmsdk.vla.types import Observation

__all__ = ["add_tape"]


def add_tape(tape: Tape, dataset: DatasetWriter) -> tuple[int, int]:
    """Add a recording to a data set; how many episodes and frames that were. A reset of the loop begins another episode.

    Commands that only bring the robot to rest are none of a frame. Raises InputError for a damaged tape, and as `DatasetWriter.add` does.
    """
    act, episodes, frames, begun = "", 0, 0, False
    seen: Observation | None = None
    for event in tape:
        match event:
            case ["act", str(kind), *_] if kind != "trip":
                act = kind
                if act == "reset" and begun:
                    dataset.end_episode()
                    episodes, begun = episodes + 1, False
            case ["seen", told]:
                seen = tape.observation(told)
            case ["apply", numbers] if act == "step" and seen is not None:
                dataset.add(seen, torch.tensor(numbers, dtype=torch.float64))
                frames, begun = frames + 1, True
    if begun:
        dataset.end_episode()
    return episodes + begun, frames
