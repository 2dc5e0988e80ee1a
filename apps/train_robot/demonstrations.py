"""A demonstration and the file of all of a task's. Letters: m pictures, c cameras, t steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mmsdk.apps.kept import write

__all__ = ["Demonstration", "save"]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Pictures, and the step that each was taken at; for each step the state, the script's action, where thing and goal
    were. Where nothing was `acted`, the actions mean nothing: a scene to look at."""

    pictures: UInt8[Tensor, "m c 3 h w"]
    taken: Int[Tensor, " m"]
    states: Float[Tensor, "t 4"]
    actions: Float[Tensor, "t 4"]
    places: Float[Tensor, "t 6"]
    acted: bool = True


def save(made: Sequence[Demonstration], path: Path) -> None:
    """All demonstrations of a task behind one another; `steps` and `looks` are how many each has, `acted` is its own."""
    tensors = {name: torch.cat([getattr(each, name) for each in made]) for name in ("pictures", "taken", "states", "actions", "places")}
    tensors["steps"] = torch.tensor([len(each.states) for each in made])
    tensors["acted"] = torch.tensor([each.acted for each in made])
    tensors["looks"] = torch.tensor([len(each.taken) for each in made])
    write(path, tensors)
