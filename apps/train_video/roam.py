"""A larger world, drawn, and a window that moves over it: what a model of worlds learns, by frames that know those before them.

Things lie still on a plane without an edge; an action moves the window, so that what leaves the view can come back. A clip is taught all at
once (teacher forcing, arXiv 2412.07772): clean frames and noisy ones side by side, a noisy frame reading itself and the clean ones before
it, some of which are hidden, as a bounded memory would not read them. Every step is a pure function of the seed and its number.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.apps.train_video.learn import CLEANEST, CONFIG, Recipe, Stage, spoken, stage_of
from mmsdk.apps.train_video.plain import attended
from mmsdk.apps.train_video.world import COLOURS, SHAPES, SIDE, cover, palette
from mmsdk.diffusion.dit import DiT
from mmsdk.diffusion.imagine import Imaginer, Screen
from mmsdk.diffusion.rotary import Anywhere, Roaming
from mmsdk.diffusion.types import Spot
from mmsdk.diffusion.words import Words
from mmsdk.diffusion.world.model import WorldModel, save_world_model

__all__ = [
    "ACTIONS",
    "FRAMES",
    "PIXELS",
    "RECIPE",
    "ROAMING",
    "Lands",
    "Taught",
    "loss_of",
    "save",
    "seen",
    "settled",
    "steps_of",
    "wandered",
    "world_of",
]

PIXELS, FRAMES = 32, 10
"""Rows and columns of a frame, of what is 64 lengths wide, and frames of a clip that is taught."""
ACTIONS: dict[str, tuple[float, float]] = {"stay": (0, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
STRIDE = 16.0  # lengths that the window goes in a step: 8 pixels, two tokens
ROAMING = replace(CONFIG, rotary=Roaming(), standing=Anywhere())
RECIPE = Recipe((Stage(PIXELS, 6000, 2, 7e-4),), dropped=0.5, shift=3.0)
_THINGS, _APART = 9, 40.0
_HIDDEN = 0.3


@dataclass(frozen=True, slots=True)
class Lands:
    """What lies where in some worlds: middles in lengths, columns first, colours and shapes by number, and sizes."""

    middle: Float[Tensor, "b k 2"]
    colour: Int[Tensor, "b k"]
    shape: Int[Tensor, "b k"]
    radius: Float[Tensor, "b k"]

    def captions(self) -> list[str]:
        """What is in the middle of the first window."""
        return [
            f"a {list(COLOURS)[colour]} {SHAPES[shape]}"
            for colour, shape in zip(self.colour[:, 0].tolist(), self.shape[:, 0].tolist(), strict=True)
        ]


def settled(count: int, generator: torch.Generator) -> Lands:
    """Worlds: one thing near the middle of the first window, the others around it, one in each cell of a jittered grid."""
    cells = torch.cartesian_prod(torch.arange(-1, 2), torch.arange(-1, 2)).float()
    order = cells.abs().sum(1).argsort(stable=True)
    jitter = 16 * (torch.rand(count, _THINGS, 2, generator=generator) - 0.5)
    colour, shape = (torch.randint(0, len(among), (count, _THINGS), generator=generator) for among in (COLOURS, SHAPES))
    radius = 8 + 5 * torch.rand(count, _THINGS, generator=generator)
    return Lands(_APART * cells[order] + jitter + SIDE / 2, colour, shape, radius)


def wandered(count: int, frames: int, generator: torch.Generator) -> Int[Tensor, "b t"]:
    """Actions, the first "stay": half of the paths at random, half going out and straight back, so that much comes again."""
    free = torch.randint(0, len(ACTIONS), (count, frames), generator=generator)
    way = torch.randint(1, len(ACTIONS), (count, 1), generator=generator)
    turn = torch.randint(2, max(3, frames // 2 + 1), (count, 1), generator=generator)
    back = 2 * ((way - 1) // 2) + 2 - (way - 1) % 2
    there = torch.where(torch.arange(frames) <= turn, way, torch.where(torch.arange(frames) <= 2 * turn, back, free))
    path = torch.where(torch.rand(count, 1, generator=generator) < 0.5, free, there)
    path[:, 0] = 0
    return path


def steps_of(path: Int[Tensor, "b t"]) -> Float[Tensor, "b t 2"]:
    """Where the window is in each frame, rows first, in strides."""
    moves = torch.tensor(list(ACTIONS.values()), dtype=torch.float32)
    places: Tensor = moves[path].cumsum(1)
    return places


def seen(lands: Lands, places: Float[Tensor, "b t 2"], side: int) -> Float[Tensor, "b 3 t side side"]:
    """What windows show, from -1 to 1, `side` pixels wide."""
    paints = palette()
    clip = paints[-1].view(1, 3, 1, 1, 1).expand(len(places), -1, places.shape[1], side, side)
    corner = STRIDE * places.flip(-1)
    for thing in range(lands.middle.shape[1]):
        covered = cover(lands.middle[:, None, thing] - corner, side, lands.shape[:, thing], lands.radius[:, thing, None])[:, None]
        clip = clip + covered * (paints[lands.colour[:, thing]].view(-1, 3, 1, 1, 1) - clip)
    return clip


@dataclass(frozen=True, slots=True)
class Taught:
    """Attention of clean frames, then as many noisy ones; `hidden` says which earlier frames (columns) a frame (rows) may not read.

    Clean frames read themselves and those before them; a noisy one reads itself and the clean ones before it. Both are one attention each
    over what may be read at all: a mask over all pairs would compute twice as many.
    """

    hidden: Bool[Tensor, "b t t"]

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b h s d"], values: Float[Tensor, "b h s d"], spot: Spot
    ) -> Float[Tensor, "b h s d"]:
        b, frames, _ = self.hidden.shape
        tokens = spot.grid.frame
        before = torch.ones(frames, frames, dtype=torch.bool, device=query.device).tril(-1) & ~self.hidden
        own = torch.eye(frames, dtype=torch.bool, device=query.device)
        clean, noisy = (tuple(part.split(frames * tokens, 2)[half] for part in (query, keys, values)) for half in (0, 1))
        mask = (before | own).repeat_interleave(tokens, 1).repeat_interleave(tokens, 2)[:, None]
        asking, offered, given = clean
        first = attended(asking, offered, given, mask)
        # a noisy frame stands as a row of the batch of its own
        asked, *others = (part.unflatten(2, (frames, tokens)).transpose(1, 2).flatten(0, 1) for part in noisy)
        told, shown = (
            torch.cat((part.repeat_interleave(frames, 0), other), 2) for part, other in zip((offered, given), others, strict=True)
        )
        seen_by = before.flatten(0, 1).repeat_interleave(tokens, 1)
        last = attended(asked, told, shown, F.pad(seen_by, (0, tokens), value=True)[:, None, None])
        return torch.cat((first, last.unflatten(0, (b, frames)).transpose(1, 2).flatten(2, 3)), 2)


def loss_of(model: DiT, words: Words, recipe: Recipe, step: int, dtype: torch.dtype) -> Float[Tensor, ""]:
    """The error of the velocity of one step's noisy frames, each with a sigma of its own, weighted by it."""
    generator = torch.Generator().manual_seed(1_000_003 * recipe.seed + step)
    stage, _ = stage_of(recipe, step)
    lands, path = settled(stage.rows, generator), wandered(stage.rows, FRAMES, generator)
    places = steps_of(path)
    clips = seen(lands, places, stage.side)
    noise, even = torch.randn(clips.shape, generator=generator), torch.rand(stage.rows, FRAMES, generator=generator)
    sigma = CLEANEST + (1 - CLEANEST) * recipe.shift * even / (1 + (recipe.shift - 1) * even)
    wide = sigma[:, None, :, None, None]
    both = torch.cat((clips, torch.lerp(clips, noise, wide)), 2)
    hidden = torch.rand(stage.rows, FRAMES, FRAMES, generator=generator) < _HIDDEN
    tokens = (stage.side // model.config.patch[1]) * (stage.side // model.config.patch[2])
    times = torch.cat((torch.zeros_like(sigma), 1000 * sigma), 1).repeat_interleave(tokens, 1)
    condition = words(words.numbers(spoken(lands.captions(), recipe.dropped, generator)))
    window = places * (STRIDE * stage.side / SIDE) / torch.tensor(model.config.patch[1:], dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        velocity = model(both, times, replace(condition, places=torch.cat((window, window), 1)), Taught(hidden))
    error = (velocity[:, :, FRAMES:].float() - (noise - clips)).square().mean((1, 3, 4))
    loss: Tensor = (sigma * error).mean()
    return loss


def world_of(imaginer: Imaginer) -> WorldModel:
    """What was learned as a world model: a frame an action, each move by its name in pixels."""
    pixel = STRIDE * PIXELS / SIDE
    moves = {name: (rows * pixel, columns * pixel) for name, (rows, columns) in ACTIONS.items()}
    return WorldModel(replace(imaginer, screen=Screen(1, PIXELS, PIXELS, 8.0, RECIPE.shift), scale=1.0), moves)


def save(folder: Path, imaginer: Imaginer) -> None:
    """Write it."""
    save_world_model(folder, world_of(imaginer))
