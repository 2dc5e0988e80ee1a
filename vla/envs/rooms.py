"""Rooms with coloured pillars, and walkers that are told which one to go to: plane geometry, a batch of episodes at a time.

A walker sees one row of pixels, 90 degrees wide. Pillars are of different thickness and evenly lit, so that no single picture tells how far
away one is: only how it grows from step to step does. Steps are those of vision-and-language navigation: STOP, 0.25 m forward, 15 degrees
to the left or the right. An episode is a success where the walker stops a metre from the middle of the pillar that it was told, 0.35 m more
or less. Who stopped where the pillar looks so wide would be right of some thicknesses and wrong of others; who comes too close walks
through the pillar, and may stop behind it.

Letters: n episodes, o pillars, w pixels. Lengths in metres, angles in radians.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["ACTIONS", "BEFORE", "COLOURS", "LIMIT", "WIDTH", "WITHIN", "Rooms", "Walkers", "draw", "guide"]

COLOURS = ("red", "green", "blue", "yellow", "violet")
ACTIONS = ("STOP", "forward", "left", "right")
WIDTH = 64
BEFORE, WITHIN = 1.0, 0.35
"""How far from the middle of a pillar is right, and by how much more or less still is."""
LIMIT = 80
"""Steps of an episode."""

_STEP, _TURN = 0.25, math.radians(15)
_FIELD = math.radians(90)
_THIN, _THICK = 0.12, 0.5
_CELL, _JITTER = 2.6, 0.5
_EARLY, _STRAIGHT = 0.2, math.radians(8)
_PAINTS = torch.tensor([[1.0, 0.1, 0.1], [0.1, 0.9, 0.1], [0.15, 0.2, 1.0], [0.95, 0.9, 0.1], [0.7, 0.2, 0.9]])


@dataclass(frozen=True, slots=True)
class Rooms:
    """Where the pillars stand and how thick they are, which is to be gone to, and where walkers begin; pillar i has colour i."""

    place: Float[Tensor, "n o 2"]
    radius: Float[Tensor, "n o"]
    goal: Int[Tensor, " n"]
    start: Float[Tensor, "n 2"]
    heading: Float[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.goal)


def draw(n: int, generator: torch.Generator) -> Rooms:
    """Rooms of nine cells, five with a pillar and one with the walker."""
    cells = torch.rand(n, 9, generator=generator).argsort(dim=1)[:, : len(COLOURS) + 1]
    grid = torch.stack((cells // 3 - 1, cells % 3 - 1), dim=-1) * _CELL
    places = grid + (2 * torch.rand(grid.shape, generator=generator) - 1) * _JITTER
    return Rooms(
        place=places[:, :-1],
        radius=_THIN + (_THICK - _THIN) * torch.rand(n, len(COLOURS), generator=generator),
        goal=torch.randint(len(COLOURS), (n,), generator=generator),
        start=places[:, -1],
        heading=2 * math.pi * torch.rand(n, generator=generator),
    )


class Walkers:
    """One walker to each room."""

    def __init__(self, rooms: Rooms) -> None:
        self.rooms = rooms
        self.place, self.heading = rooms.start.clone(), rooms.heading.clone()
        self.stopped = torch.zeros(len(rooms), dtype=torch.bool)

    @property
    def distance(self) -> Float[Tensor, " n"]:
        """How far away the middle of the pillar is that each was told."""
        away: Tensor = torch.linalg.vector_norm(self._way(), dim=1)
        return away

    @property
    def near(self) -> Bool[Tensor, " n"]:
        """Where STOP is right."""
        return (self.distance - BEFORE).abs() < WITHIN

    @property
    def bearing(self) -> Float[Tensor, " n"]:
        """How far to the left that pillar is of straight ahead, in (-pi, pi]."""
        way = self._way()
        angle = torch.atan2(way[:, 1], way[:, 0]) - self.heading
        return torch.atan2(angle.sin(), angle.cos())

    def look(self) -> Float[Tensor, "n 3 w"]:
        """What they see, in [-1, 1], from left to right: a pixel has the colour of the first pillar on its ray, and is dark without one."""
        angles = self.heading[:, None] + _FIELD * (0.5 - (torch.arange(WIDTH) + 0.5) / WIDTH)
        rays = torch.stack((angles.cos(), angles.sin()), dim=-1)
        way = self.rooms.place - self.place[:, None]
        along = torch.einsum("nwx,nox->nwo", rays, way)
        left = self.rooms.radius[:, None] ** 2 - ((way**2).sum(-1)[:, None] - along**2)
        reach = along + left.clamp_min(0).sqrt()
        # the near side of a pillar is behind one who stands in it
        first = (along - left.clamp_min(0).sqrt()).clamp_min(0)
        hit = (left > 0) & (reach > 0)
        nearest = torch.where(hit, first, torch.inf).argmin(dim=-1)
        colours = _PAINTS[nearest] * hit.any(-1, keepdim=True)
        return 2 * colours.transpose(1, 2) - 1

    def apply(self, action: Int[Tensor, " n"]) -> None:
        """One step; who has stopped stays."""
        self.stopped = self.stopped | (action == 0)
        turn = ((action == 2).float() - (action == 3).float()) * _TURN
        self.heading = torch.where(self.stopped, self.heading, self.heading + turn)
        ahead = torch.stack((self.heading.cos(), self.heading.sin()), dim=1) * _STEP
        goes = (action == 1) & ~self.stopped
        self.place = torch.where(goes[:, None], self.place + ahead, self.place)

    def renew(self, which: Bool[Tensor, " n"], rooms: Rooms) -> None:
        """These walkers begin anew, in the rooms of the same number."""
        mine = self.rooms
        self.rooms = Rooms(*(torch.where(_as(which, new), new, old) for old, new in zip(_fields(mine), _fields(rooms), strict=True)))
        self.place = torch.where(which[:, None], rooms.start, self.place)
        self.heading = torch.where(which, rooms.heading, self.heading)
        self.stopped = self.stopped & ~which

    def _way(self) -> Float[Tensor, "n 2"]:
        return self.rooms.place[torch.arange(len(self.rooms)), self.rooms.goal] - self.place


def _fields(rooms: Rooms) -> tuple[Tensor, ...]:
    return rooms.place, rooms.radius, rooms.goal, rooms.start, rooms.heading


def _as(which: Bool[Tensor, " n"], like: Tensor) -> Bool[Tensor, "n *rest"]:
    """With as many axes as `like` has."""
    return which.view(-1, *[1] * (like.dim() - 1))


def guide(walkers: Walkers) -> Int[Tensor, " n"]:
    """The step of one who knows the way: turn left until the pillar is in sight, face it, go to it, stop a little before a metre is left.

    Who is too close goes on through the pillar, and stops behind it.
    """
    bearing, distance = walkers.bearing, walkers.distance
    out_of_sight = bearing.abs() > _FIELD / 2
    turns = torch.where(out_of_sight | (bearing > 0), 2, 3)
    action = torch.where(out_of_sight | (bearing.abs() > _STRAIGHT), turns, 1)
    action = torch.where(distance < BEFORE + _EARLY, 0, action)
    return torch.where(distance < BEFORE - WITHIN, 1, action)
