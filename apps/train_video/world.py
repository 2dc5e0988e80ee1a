"""A world of few things, drawn: something moves across the screen, before or behind a box, or pushes it, or a robot's arm pushes it.

Everything is a pure function of a generator. Lengths are in pixels of a screen of 64 x 64, whatever the side it is drawn at; edges are as
soft as one pixel of that side, so that a coarse clip is what a fine one looks like from afar.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = [
    "BOXES",
    "COLOURS",
    "DIRECTIONS",
    "FRAMES",
    "RELATIONS",
    "SHAPES",
    "SIDE",
    "VOCABULARY",
    "Stories",
    "cover",
    "drawn",
    "film",
    "palette",
]

FRAMES, SIDE = 16, 64
COLOURS = {
    "red": (226, 54, 48),
    "green": (62, 186, 86),
    "blue": (52, 112, 236),
    "yellow": (244, 208, 62),
    "purple": (164, 84, 210),
    "white": (240, 240, 240),
}
SHAPES = ("ball", "triangle", "diamond", "cross")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
RELATIONS = ("", "behind", "in front of", "and hits", "by a robot")
BOXES = (*COLOURS, "")
_ROBOT = len(RELATIONS) - 1
# what came later stands behind: a word's number is its place
VOCABULARY = (
    *sorted({"a", "moves", "box", *COLOURS, *SHAPES, *DIRECTIONS, *" ".join(RELATIONS[:_ROBOT]).split()}),
    *("robot", "pushes"),
)
_GROUND, _ARM = (22, 24, 32), (126, 132, 146)
_HALF = 11.0  # of a box's side: more than anything that may be behind it
_LINK, _THICK = 26.0, 2.4  # of the arm: both links' length, and half of their width
_BEHIND, _ASIDE = 28.0, 20.0  # where the arm stands, seen from the middle of the screen against the way that it pushes


@dataclass(frozen=True, slots=True)
class Stories:
    """What happens in some clips, by numbers: those of COLOURS, SHAPES, DIRECTIONS, RELATIONS, and the colour of the box, or none (6)."""

    colour: Int[Tensor, " b"]
    shape: Int[Tensor, " b"]
    direction: Int[Tensor, " b"]
    relation: Int[Tensor, " b"]
    box: Int[Tensor, " b"]

    def __len__(self) -> int:
        return len(self.colour)

    def captions(self) -> list[str]:
        """Each in one sentence."""
        return [_sentence(*told) for told in self.table().tolist()]

    def table(self) -> Int[Tensor, "b 5"]:
        """All of it, a row each."""
        return torch.stack((self.colour, self.shape, self.direction, self.relation, self.box), 1)


def drawn(count: int, generator: torch.Generator) -> Stories:
    """Stories, all equally likely; a box never has the colour of what moves, and there is none where nothing is done with it."""
    colour, shape, direction, relation = (
        torch.randint(0, len(among), (count,), generator=generator) for among in (COLOURS, SHAPES, DIRECTIONS, RELATIONS)
    )
    other = (colour + torch.randint(1, len(COLOURS), (count,), generator=generator)) % len(COLOURS)
    alone = (relation == 0) | (relation == _ROBOT)
    return Stories(colour, shape, direction, relation, torch.where(alone, len(COLOURS), other))


def film(stories: Stories, side: int, generator: torch.Generator) -> Float[Tensor, "b 3 t side side"]:
    """The clips, from -1 to 1; the generator draws sizes, speeds and where things begin."""
    thing, box = _paths(stories, generator)
    radius = _between(7.5, 8.5, len(stories), generator)
    covers = cover(thing, side, stories.shape, radius), cover(box, side, torch.full_like(stories.shape, len(SHAPES)), radius)
    paint_of = palette()
    paints = paint_of[stories.colour], paint_of[stories.box]
    behind = stories.relation == 1
    clip = paint_of[-1].view(1, 3, 1, 1, 1).expand(len(stories), -1, FRAMES, side, side)
    for near, far in ((1, 0), (0, 1)):
        # the far one first; nothing is painted where there is no box
        covered = torch.where(behind.view(-1, 1, 1, 1), covers[far], covers[near])[:, None]
        paint = torch.where(behind[:, None], paints[far], paints[near])
        clip = clip + covered * (paint.view(-1, 3, 1, 1, 1) - clip)
    pushed = (stories.relation == _ROBOT).nonzero()[:, 0]
    if not len(pushed):
        return clip
    arm = _arm(thing[pushed], stories.direction[pushed], radius[pushed], side)[:, None]
    clip[pushed] = clip[pushed] + arm * (torch.tensor(_ARM).view(1, 3, 1, 1, 1) / 127.5 - 1 - clip[pushed])
    return clip


def palette() -> Float[Tensor, "c 3"]:
    """The colours, from -1 to 1, and behind them the ground."""
    return torch.tensor([*COLOURS.values(), _GROUND]) / 127.5 - 1


def _sentence(colour: int, shape: int, direction: int, relation: int, box: int) -> str:
    if relation == _ROBOT:
        return f"a robot pushes a {list(COLOURS)[colour]} {SHAPES[shape]} {list(DIRECTIONS)[direction]}"
    told = f"a {list(COLOURS)[colour]} {SHAPES[shape]} moves {list(DIRECTIONS)[direction]}"
    return f"{told} {RELATIONS[relation]} a {BOXES[box]} box" if relation else told


def _between(low: float, high: float, count: int, generator: torch.Generator) -> Float[Tensor, "b 1"]:
    return low + (high - low) * torch.rand(count, 1, generator=generator)


def _paths(stories: Stories, generator: torch.Generator) -> tuple[Float[Tensor, "b t 2"], Float[Tensor, "b t 2"]]:
    """Where the middles of the thing and of the box are in each frame; what is hit goes on with the speed of what stops there."""
    count, hits = len(stories), (stories.relation == 3)[:, None]
    way = _between(40.0, 44.0, count, generator)
    off, aside = _between(-8.0, 8.0, count, generator), _between(-1.0, 1.0, count, generator)
    time = torch.arange(FRAMES) / (FRAMES - 1)
    along = (time - 0.5) * way
    box = _between(-2.0, 2.0, count, generator) + torch.where(hits, 5.0, 0.0)
    touch = box - _HALF - 8.0
    paths = [torch.where(hits, along.minimum(touch), along), torch.where(hits, box + (along - touch).clamp_min(0), box.expand_as(along))]
    step = torch.tensor(list(DIRECTIONS.values()), dtype=torch.float32)[stories.direction][:, None]
    across = step.flip(2).abs()
    sides = (off, off + aside)
    there, beside = ((SIDE / 2 + path[..., None] * step + side[..., None] * across) for path, side in zip(paths, sides, strict=True))
    return there, beside


def cover(middle: Float[Tensor, "b t 2"], side: int, shape: Int[Tensor, " b"], radius: Float[Tensor, "b 1"]) -> Float[Tensor, "b t h w"]:
    """How much of each pixel lies within, by the distance to the edge."""
    pixel = SIDE / side
    at = (torch.arange(side) + 0.5) * pixel
    x, y = at - middle[..., 0, None, None], at[:, None] - middle[..., 1, None, None]
    distance = torch.empty(len(shape), middle.shape[1], side, side)
    for kind, edge in enumerate(_EDGES):
        rows = (shape == kind).nonzero()[:, 0]
        if len(rows):
            distance[rows] = edge(x[rows], y[rows], radius[rows].view(-1, 1, 1, 1))
    return (0.5 - distance / pixel).clamp(0, 1)


def _arm(
    thing: Float[Tensor, "b t 2"], direction: Int[Tensor, " b"], radius: Float[Tensor, "b 1"], side: int
) -> Float[Tensor, "b t side side"]:
    """How much of each pixel the arm covers: two links from where it stands to what it pushes, bent at the elbow as these allow."""
    way = torch.tensor(list(DIRECTIONS.values()), dtype=torch.float32)[direction][:, None]
    across = way.flip(2).abs()
    foot = SIDE / 2 - _BEHIND * way + _ASIDE * across
    hand = thing - (radius[..., None] + _THICK) * way
    reach = hand - foot
    half = reach.norm(dim=-1, keepdim=True).clamp(1e-3, 2 * _LINK) / 2
    # two equal sides make a triangle; its elbow lies on the side that leaves the way free
    bent = torch.stack((-reach[..., 1], reach[..., 0]), -1) / (2 * half) * (_LINK**2 - half.square()).clamp_min(0).sqrt()
    elbow = foot + reach / 2 + bent * (way.sum(-1, keepdim=True) * torch.where(way[..., :1] == 0, 1.0, -1.0))
    pixel = SIDE / side
    at = (torch.arange(side) + 0.5) * pixel
    spots = torch.stack(torch.meshgrid(at, at, indexing="xy"), -1)
    distance = torch.minimum(*(_from_line(spots, *ends) for ends in ((foot.expand_as(hand), elbow), (elbow, hand)))) - _THICK
    return (0.5 - distance / pixel).clamp(0, 1)


def _from_line(spots: Float[Tensor, "h w 2"], one: Float[Tensor, "b t 2"], other: Float[Tensor, "b t 2"]) -> Float[Tensor, "b t h w"]:
    """How far spots are from the lines between points."""
    line, to = (other - one)[:, :, None, None], spots - one[:, :, None, None]
    share = ((to * line).sum(-1) / line.square().sum(-1).clamp_min(1e-6)).clamp(0, 1)
    far: Tensor = (to - share[..., None] * line).norm(dim=-1)
    return far


def _ball(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    return (x.square() + y.square()).sqrt() - r


def _triangle(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    return torch.maximum(y, 0.866 * x.abs() - 0.5 * y) - 0.58 * r


def _diamond(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    return (x.abs() + y.abs() - 1.15 * r) * 0.7071


def _cross(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    wide, high = x.abs(), y.abs()
    return torch.maximum(torch.minimum(wide, high) - 0.36 * r, torch.maximum(wide, high) - 1.05 * r)


def _box(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    return torch.maximum(x.abs(), y.abs()) - _HALF


_EDGES = (_ball, _triangle, _diamond, _cross, _box)
