"""A model that goes frame by frame: an imaginer, and what each action does to the window through which it looks at its world."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.diffusion.imagine import SETTINGS, Imaginer, open_imaginer, save_imaginer
from mmsdk.errors import InputError, ModelError
from mmsdk.plugins import near
from mmsdk.weights.fields import Fields, read_fields

__all__ = ["Move", "WorldModel", "open_world_model", "save_world_model"]

Move = tuple[float, float]
_STEPS = 4


@dataclass(frozen=True, slots=True)
class WorldModel:
    """`moves` are rows and columns, in pixels, that the window goes by an action's name; without any, an action is a text for what follows.

    The imaginer's screen says how many frames an action makes; `steps` are those of each.
    """

    imaginer: Imaginer
    moves: Mapping[str, Move] = field(default_factory=dict)
    steps: int = _STEPS

    def moved(self, place: Float[Tensor, " 2"], action: str) -> Float[Tensor, " 2"]:
        """Where the window is after an action, in tokens. Raises InputError for an action that there is not, saying what is near."""
        if action not in self.moves:
            raise InputError(
                f"there is no such action; {near(str(action), list(self.moves))}there is {', '.join(self.moves)}", item=str(action)
            )
        sides = self.imaginer.model.config.patch[1:]
        return place + torch.tensor([way / side for way, side in zip(self.moves[action], sides, strict=True)], dtype=place.dtype)


def open_world_model(folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> WorldModel:
    """The model of a folder that `mmsdk.apps.train_video` wrote, of either kind. Raises as `open_imaginer` does."""
    imaginer, fields = open_imaginer(folder, dtype, device), read_fields(Path(folder) / SETTINGS)
    moves = fields.group("moves")
    found = {name: _move(moves, name) for name in moves.values}
    return WorldModel(imaginer, found, fields.whole("steps", _STEPS))


def save_world_model(folder: Path, model: WorldModel, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a folder that `open_world_model` reads; the settings last, each file whole or not at all."""
    moves = {name: list(move) for name, move in model.moves.items()}
    save_imaginer(folder, model.imaginer, dtype, {"moves": moves, "steps": model.steps})


def _move(moves: Fields, name: str) -> Move:
    ways = moves.reals(name, ())
    if len(ways) != 2:
        raise ModelError(f"{moves.where}: {name} is {moves.values[name]!r}, it must be rows and columns")
    return ways[0], ways[1]
