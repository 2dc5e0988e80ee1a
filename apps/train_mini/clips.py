"""Moving scenes: eight frames in which things move, wait, appear one after another or blink, each with its story as data."""

from dataclasses import dataclass

import numpy as np

from mmsdk.apps.train_mini.scenes import Artist, Thing

__all__ = ["FRAMES", "Actor", "Clip", "clip"]

FRAMES = 8


@dataclass(frozen=True, slots=True)
class Actor:
    """A thing and what it does: `motion` is left, right, up, down or still; `shown` says in which frames it is visible."""

    thing: Thing
    motion: str
    shown: tuple[bool, ...]
    path: tuple[tuple[float, float], ...]

    @property
    def first(self) -> int:
        """The first frame in which it is visible."""
        return self.shown.index(True)

    @property
    def showings(self) -> int:
        """How many times it comes into view."""
        return sum(now and not before for before, now in zip((False, *self.shown), self.shown, strict=False))


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames (uint8, t h w 3) and the actors; `story` is motion, order, blink or robot; `action` is what a robot does."""

    frames: np.ndarray
    actors: tuple[Actor, ...]
    story: str
    action: str = ""


def _cells(rng: np.random.Generator, n: int) -> list[int]:
    return [int(c) for c in rng.permutation(9)[:n]]


def _motion(rng: np.random.Generator, n: int) -> list[tuple[str, list[tuple[float, float]], tuple[bool, ...]]]:
    """n actors; at least one moves. Movers keep to a lane of their own: a third of the height (or width) of the picture."""
    horizontal = bool(rng.random() < 0.5)
    lanes = [int(v) for v in rng.permutation(3)[:n]]
    movers = int(rng.integers(1, n + 1))
    found = []
    for i, lane in enumerate(lanes):
        across = (lane + 0.5) / 3 + rng.uniform(-0.05, 0.05)
        if i < movers:
            motion = (("left", "right") if horizontal else ("up", "down"))[rng.integers(2)]
            span = rng.uniform(0.35, 0.62)
            low = rng.uniform(0.16, 0.84 - span)
            along = np.linspace(low, low + span, FRAMES)
            if motion in ("left", "up"):
                along = along[::-1]
        else:
            motion, along = "still", np.full(FRAMES, rng.uniform(0.2, 0.8))
        path = [(float(a), across) if horizontal else (across, float(a)) for a in along]
        found.append((motion, path, (True,) * FRAMES))
    return found


def _order(rng: np.random.Generator, n: int) -> list[tuple[str, list[tuple[float, float]], tuple[bool, ...]]]:
    """n still actors that come into view one after another; half of the clips show one at a time, half let them stay."""
    starts = [round(i * FRAMES / n) for i in range(n)]
    stay = rng.random() < 0.5
    found = []
    for i, cell in enumerate(_cells(rng, n)):
        end = FRAMES if stay or i == n - 1 else starts[i + 1]
        spot = ((cell % 3 + 0.5) / 3 + rng.uniform(-0.08, 0.08), (cell // 3 + 0.5) / 3 + rng.uniform(-0.08, 0.08))
        found.append(("still", [spot] * FRAMES, tuple(starts[i] <= t < end for t in range(FRAMES))))
    return found


def _blink(rng: np.random.Generator, n: int) -> list[tuple[str, list[tuple[float, float]], tuple[bool, ...]]]:
    """The first actor comes into view one to four times; the others stay."""
    times = int(rng.integers(1, 5))
    shown = np.zeros(FRAMES, bool)
    shown[rng.permutation(4)[:times] * 2 + int(rng.integers(2))] = True
    found = []
    for i, cell in enumerate(_cells(rng, n)):
        spot = ((cell % 3 + 0.5) / 3 + rng.uniform(-0.08, 0.08), (cell // 3 + 0.5) / 3 + rng.uniform(-0.08, 0.08))
        found.append(("still", [spot] * FRAMES, tuple(bool(v) for v in shown) if i == 0 else (True,) * FRAMES))
    return found


def clip(artist: Artist, rng: np.random.Generator, side: int = 224) -> Clip:
    """A clip of `FRAMES` frames, side x side pixels: half motion, a third order, the rest blinking."""
    story = str(rng.choice(("motion", "order", "blink"), p=(0.5, 0.33, 0.17)))
    n = int(rng.integers(1, 4)) if story == "motion" else int(rng.integers(2, 5)) if story == "order" else int(rng.integers(1, 3))
    plan = {"motion": _motion, "order": _order, "blink": _blink}[story](rng, n)
    canvas, background = artist.background(rng, (side, side))
    frames = [canvas.copy() for _ in range(FRAMES)]
    actors: list[Actor] = []
    for motion, path, shown in plan:
        name, colour, kind = artist.pick(rng, [a.thing for a in actors], background)
        sprite = artist.sprite(name, colour, kind, int(rng.integers(42, 70)), rng)
        for t in range(FRAMES):
            if shown[t]:
                x, y = path[t]
                frames[t].paste(sprite, (int(x * side - sprite.width / 2), int(y * side - sprite.height / 2)), sprite)
        x, y = path[shown.index(True)]
        thing = Thing(name, colour, kind, x, y, sprite.width / side, sprite.height / side)
        actors.append(Actor(thing, motion, shown, tuple(path)))
    return Clip(np.stack([np.asarray(f) for f in frames]), tuple(actors), story)
