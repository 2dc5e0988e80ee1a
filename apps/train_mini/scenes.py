"""Still scenes: one to six things on a background, each with a name, a colour and a place, drawn from a seeded generator.

A scene is a pure function of its generator, so train and held-out sets are seeds, not files. Held-out scenes use backgrounds, (colour,
shape) pairs and pairs of names that training scenes never show.
"""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmsdk.apps.train_mini import vocabulary as words
from mmsdk.errors import InputError

__all__ = ["Artist", "Scene", "Thing"]

_SIZES = ((224, 224), (196, 252), (252, 196), (168, 294), (294, 168))


@dataclass(frozen=True, slots=True)
class Thing:
    """One drawn thing: kind is object, shape, word or number; x, y its centre and w, h its extent, all in [0, 1]."""

    name: str
    colour: str
    kind: str
    x: float
    y: float
    w: float
    h: float

    @property
    def place(self) -> str:
        return words.place_of(self.x, self.y)

    @property
    def phrase(self) -> str:
        """What a person would call it: "dog", "red circle", "the word TAXI"."""
        if self.kind in ("word", "number"):
            return f"the {self.kind} {self.name}"
        return f"{self.colour} {self.name}" if self.kind == "shape" else self.name


@dataclass(frozen=True, slots=True)
class Scene:
    """Pixels (uint8, h w 3), the things in reading order, and the colour of a plain background ("" for others)."""

    pixels: np.ndarray
    things: tuple[Thing, ...]
    background: str = ""
    photo: tuple[str, str] | None = None
    suite: str = "scene"


def _shape_points(shape: str, r: float) -> list[tuple[float, float]]:
    def ring(n: int, radii: Sequence[float], turn: float = -math.pi / 2) -> list[tuple[float, float]]:
        return [
            (radii[i % len(radii)] * math.cos(turn + 2 * math.pi * i / n), radii[i % len(radii)] * math.sin(turn + 2 * math.pi * i / n))
            for i in range(n)
        ]

    if shape == "square":
        return [(-0.85 * r, -0.85 * r), (0.85 * r, -0.85 * r), (0.85 * r, 0.85 * r), (-0.85 * r, 0.85 * r)]
    if shape == "cross":
        a = 0.33 * r
        return [(-a, -r), (a, -r), (a, -a), (r, -a), (r, a), (a, a), (a, r), (-a, r), (-a, a), (-r, a), (-r, -a), (-a, -a)]
    if shape == "heart":
        ts = [2 * math.pi * i / 40 for i in range(40)]
        return [
            (r / 17 * 16 * math.sin(t) ** 3, -r / 17 * (13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)))
            for t in ts
        ]
    return {
        "circle": ring(48, (r,)), "triangle": ring(3, (r,)), "diamond": ring(4, (r, 0.7 * r)), "star": ring(10, (r, 0.42 * r)),
        "hexagon": ring(6, (r,)),
    }[shape]  # fmt: skip


def _checked(font: Path) -> Path:
    """A font that can be read: said before hours of drawing, not at the first word among them."""
    try:
        ImageFont.truetype(str(font), 24)
    except OSError as error:
        raise InputError(
            f"the font cannot be read ({error}); on Debian and Ubuntu: apt install fonts-dejavu-core", item=str(font)
        ) from error
    return font


def _crop(source: Image.Image, rng: np.random.Generator, size: tuple[int, int], least: float) -> Image.Image:
    h, w = size
    scale = min(source.width / w, source.height / h) * rng.uniform(least, 1)
    cw, ch = w * scale, h * scale
    x, y = rng.random() * (source.width - cw), rng.random() * (source.height - ch)
    crop = source.resize((w, h), Image.Resampling.BICUBIC, box=(x, y, x + cw, y + ch))
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else crop


def _dimmed(picture: Image.Image, share: float) -> Image.Image:
    return picture.point([min(255, int(v * share)) for v in range(256)] * 3)


class Artist:
    """Draws things and scenes from the unpacked emoji set, the photos of scikit-image and the DejaVu fonts.

    `emoji` is the folder with emoji.json and img/google/64, `photos` the folder with the photos. With `backdrops`, folders of further
    pictures, every scene is drawn on one of these. Raises InputError where a font is missing.
    """

    def __init__(
        self, emoji: Path, photos: Path, fonts: Path = Path("/usr/share/fonts/truetype/dejavu"), *, held_out: bool = False,
        backdrops: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        self.held_out = held_out
        self._fonts = [_checked(fonts / name) for name in ("DejaVuSans-Bold.ttf", "DejaVuSerif-Bold.ttf", "DejaVuSansMono-Bold.ttf")]
        files = {e["short_name"]: e["image"] for e in json.loads((emoji / "emoji.json").read_text())}
        self._emoji = {k.name: Image.open(emoji / "img" / "google" / "64" / files[k.emoji]).convert("RGBA") for k in words.OBJECTS}
        self.photos = {
            name: Image.open(photos / name).convert("RGB") for name in words.PHOTOS if (name in words.HELD_OUT_PHOTOS) == held_out
        }
        self._backdrops = [Image.open(file).convert("RGB") for folder in backdrops for file in sorted(folder.iterdir())]

    @functools.lru_cache(maxsize=256)  # noqa: B019 - artists live as long as the program
    def _font(self, family: int, size: int) -> ImageFont.FreeTypeFont:
        return ImageFont.truetype(str(self._fonts[family]), size)

    def background(self, rng: np.random.Generator, size: tuple[int, int], avoid: Sequence[str] = ()) -> tuple[Image.Image, str]:
        """A picture of (h, w) pixels and the name of its colour ("" unless plain)."""
        h, w = size
        if self._backdrops:
            return self._backdrop(rng, size), ""
        style = rng.random()
        if style < 0.45:
            names = [c for c in words.COLOURS if c not in avoid]
            name = names[rng.integers(len(names))]
            rgb = np.clip(np.array(words.COLOURS[name]) + rng.integers(-12, 13, 3), 0, 255)
            return Image.new("RGB", (w, h), tuple(int(v) for v in rgb)), name
        if style < 0.65:
            ends = rng.integers(0, 256, (2, 3))
            angle = rng.random() * 2 * math.pi
            yy, xx = np.mgrid[0:h, 0:w] / max(h, w)
            ramp = np.clip(xx * math.cos(angle) + yy * math.sin(angle), -1, 1)[..., None] / 2 + 0.5
            return Image.fromarray((ends[0] * ramp + ends[1] * (1 - ramp)).astype(np.uint8)), ""
        if style < 0.72:
            noise = rng.integers(0, 256, (rng.integers(3, 40), rng.integers(3, 40), 3), dtype=np.uint8)
            return Image.fromarray(noise).resize((w, h), Image.Resampling.BICUBIC), ""
        photo = self.photo(rng, size, list(self.photos)[rng.integers(len(self.photos))])
        return _dimmed(photo, rng.uniform(0.5, 0.95)), ""

    def _backdrop(self, rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
        """A crop of a backdrop; half of the time with its channels in another order, as there are few backdrops."""
        crop = _crop(self._backdrops[int(rng.integers(len(self._backdrops)))], rng, size, least=0.35)
        if rng.random() < 0.5:
            channels = crop.split()
            crop = Image.merge("RGB", [channels[int(i)] for i in rng.permutation(3)])
        return _dimmed(crop, rng.uniform(0.5, 1.1))

    def photo(self, rng: np.random.Generator, size: tuple[int, int], name: str, least: float = 0.35) -> Image.Image:
        """A random crop of a photo (at least `least` of its shorter side), perhaps mirrored, as (h, w) pixels."""
        return _crop(self.photos[name], rng, size, least)

    def sprite(self, name: str, colour: str, kind: str, size: int, rng: np.random.Generator) -> Image.Image:
        """An RGBA cut-out of a thing, `size` pixels on its longer side (for text: the font size)."""
        if kind == "object":
            return self._emoji[name].resize((size, size), Image.Resampling.BICUBIC)
        ink = tuple(int(v) for v in np.clip(np.array(words.COLOURS[colour]) + rng.integers(-10, 11, 3), 0, 255))
        if kind == "shape":
            big = Image.new("RGBA", (size * 3, size * 3))
            turn = rng.uniform(-0.15, 0.15)
            c, s = math.cos(turn), math.sin(turn)
            points = [(1.5 * size + x * c - y * s, 1.5 * size + x * s + y * c) for x, y in _shape_points(name, 1.4 * size)]
            ImageDraw.Draw(big).polygon(points, fill=(*ink, 255))
            return big.resize((size, size), Image.Resampling.BOX)
        font = self._font(int(rng.integers(len(self._fonts))), size)
        left, top, right, bottom = font.getbbox(name)
        pad = max(3, size // 6)
        plate = ink if sum(ink) > 380 else (255, 255, 255)
        text = (0, 0, 0) if sum(ink) > 380 else ink
        board = Image.new("RGBA", (int(right - left) + 2 * pad, int(bottom - top) + 2 * pad), (*plate, 255))
        ImageDraw.Draw(board).text((pad - left, pad - top), name, font=font, fill=(*text, 255))
        return board

    def pick(self, rng: np.random.Generator, taken: Sequence[Thing], background: str) -> tuple[str, str, str]:
        """(name, colour, kind) of another object or shape that does not clash with those already there."""
        while True:
            if rng.random() < 0.4:
                shape = words.SHAPES[rng.integers(len(words.SHAPES))]
                colour = list(words.COLOURS)[rng.integers(len(words.COLOURS))]
                rare = (colour, shape) in words.HELD_OUT_SHAPES
                if colour == background or (rare and not self.held_out):
                    continue
                return shape, colour, "shape"
            kind = words.OBJECTS[rng.integers(len(words.OBJECTS))]
            clash = any(words.held_out_pair(kind.name, t.name) for t in taken) and not self.held_out
            if clash or any(t.name == kind.name for t in taken):
                continue
            return kind.name, kind.colour, "object"

    def place(self, canvas: Image.Image, sprite: Image.Image, cell: int, rng: np.random.Generator, label: tuple[str, str, str]) -> Thing:
        """Paste the sprite with its centre well inside the cell (0 to 8, reading order) and wholly inside the canvas."""
        w, h = canvas.size
        room_x, room_y = max(0.02, min(0.1, 0.36 - sprite.width / w)), max(0.02, min(0.1, 0.36 - sprite.height / h))
        x = (cell % 3 + 0.5) / 3 + rng.uniform(-room_x, room_x)
        y = (cell // 3 + 0.5) / 3 + rng.uniform(-room_y, room_y)
        px = int(min(max(0, x * w - sprite.width / 2), w - sprite.width))
        py = int(min(max(0, y * h - sprite.height / 2), h - sprite.height))
        canvas.paste(sprite, (px, py), sprite)
        name, colour, kind = label
        return Thing(name, colour, kind, (px + sprite.width / 2) / w, (py + sprite.height / 2) / h, sprite.width / w, sprite.height / h)

    def _text(self, canvas: Image.Image, rng: np.random.Generator, free: list[int]) -> Thing:
        w, h = canvas.size
        kind = "word" if rng.random() < 0.7 else "number"
        pool = words.WORDS if kind == "word" else words.NUMBERS
        name = pool[rng.integers(len(pool))]
        colour = list(words.COLOURS)[rng.integers(len(words.COLOURS))]
        size = int(rng.integers(24, 46))
        sprite = self.sprite(name, colour, kind, size, rng)
        while sprite.width > 0.9 * w or sprite.height > 0.31 * h:
            size -= 3
            sprite = self.sprite(name, colour, kind, size, rng)
        row = int(rng.integers(3))
        px = int(rng.uniform(0, w - sprite.width))
        py = int(row * h / 3 + rng.uniform(0, max(1.0, h / 3 - sprite.height)))
        canvas.paste(sprite, (px, py), sprite)
        for column in range(3):
            if px < (column + 1) * w / 3 + 8 and px + sprite.width > column * w / 3 - 8:
                free.remove(row * 3 + column)
        return Thing(name, colour, kind, (px + sprite.width / 2) / w, (py + sprite.height / 2) / h, sprite.width / w, sprite.height / h)

    def scene(self, rng: np.random.Generator) -> Scene:
        """A scene of one to six things; a quarter repeat one kind two to five times; a third carry a word or a number."""
        size = _SIZES[0] if rng.random() < 0.7 else _SIZES[rng.integers(1, len(_SIZES))]
        canvas, background = self.background(rng, size)
        free, things = list(range(9)), []
        if rng.random() < 0.35:
            things.append(self._text(canvas, rng, free))
        repeats = int(rng.integers(2, 6)) if rng.random() < 0.3 else 1
        others = int(rng.choice((0, 1, 2, 3, 4), p=(0.12, 0.2, 0.28, 0.25, 0.15))) if repeats == 1 else int(rng.integers(0, 3))
        cap = int(min(size) / 3)
        for group in (repeats,) + (1,) * others:
            label = self.pick(rng, things, background)
            small = rng.random() < 0.3
            for _ in range(min(group, len(free))):
                side = int(rng.integers(26, 40)) if small else int(rng.integers(40, max(41, min(cap, 74))))
                cell = free.pop(int(rng.integers(len(free))))
                things.append(self.place(canvas, self.sprite(*label, side, rng), cell, rng, label))
        things.sort(key=lambda t: (int(t.y * 3), int(t.x * 3)))
        return Scene(np.asarray(canvas), tuple(things), background)

    def photo_scene(self, rng: np.random.Generator) -> Scene:
        """A crop of a real photo, with its main object and caption."""
        name = list(self.photos)[rng.integers(len(self.photos))]
        size = _SIZES[rng.integers(len(_SIZES))]
        return Scene(np.asarray(self.photo(rng, size, name, least=0.6)), (), photo=words.PHOTOS[name], suite="photo")
