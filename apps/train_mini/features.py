"""Samples and their features: each drawn scene, photo, render or clip with what the encoder sees of it, kept in shards on disk.

A shard is a safetensors file (features, grids, counts) beside a JSON file (what is in each sample). It is a pure function of where it
comes from (a seed and counts), which its metadata `origin` says, so an interrupted run goes on with the shards it has.
"""

import dataclasses
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from mmsdk.apps.kept import write
from mmsdk.apps.train_mini.clips import Actor, Clip, clip
from mmsdk.apps.train_mini.questions import about_scene
from mmsdk.apps.train_mini.questions_clip import about_clip
from mmsdk.apps.train_mini.scenes import Artist, Scene, Thing
from mmsdk.apps.train_mini.vocabulary import place_of
from mmsdk.apps.train_mini.wording import QA
from mmsdk.errors import InputError
from mmsdk.vision.types import Image, Media, Video, VisionEncoder, VisualTokens

__all__ = ["Renders", "Sample", "Shard", "build", "check_origin", "draw", "encoded", "media_of", "read"]

_LEAST = 0.002
"""Smallest share of a render that a thing must cover to be asked about: about half a patch of 256."""
_NOTHING = np.zeros((0, 0, 3), np.uint8)


@dataclass(frozen=True, slots=True)
class Sample:
    """One picture or clip without its pixels: the features live in the shard."""

    scene: Scene | None
    clip: Clip | None

    def questions(self, rng: np.random.Generator) -> list[QA]:
        """Fresh questions about it."""
        if self.clip is not None:
            return about_clip(self.clip, rng)
        assert self.scene is not None
        return about_scene(self.scene, rng)


@dataclass(frozen=True, slots=True)
class Shard:
    """Samples with their features [n, most, d] (16-bit), true counts [n] and grids [n, 3]."""

    samples: tuple[Sample, ...]
    features: Tensor
    counts: Tensor
    grids: Tensor

    def __len__(self) -> int:
        return len(self.samples)

    def tokens(self, i: int, keep: Tensor | None = None) -> VisualTokens:
        """The visual tokens of sample i, all or those at the (ascending) indices `keep`."""
        n, grid = int(self.counts[i]), tuple(int(v) for v in self.grids[i])
        index = torch.arange(n) if keep is None else keep
        plane = grid[1] * grid[2]
        positions = torch.stack((index // plane, index % plane // grid[2], index % grid[2]), dim=1)
        features = self.features[i, index].float()
        return VisualTokens(
            features, positions, torch.ones(len(index)), (grid[0], grid[1], grid[2]), torch.arange(grid[0]).float(), torch.zeros(0)
        )


class Renders:
    """Pictures and clips of the robot simulators, rendered beforehand by `renders.render` into a folder."""

    def __init__(self, folder: Path) -> None:
        self._images = np.load(folder / "images.npy", mmap_mode="r")
        self._clips = np.load(folder / "clips.npy", mmap_mode="r")
        self._image_notes = json.loads((folder / "images.json").read_text())
        self._clip_notes = json.loads((folder / "clips.json").read_text())

    def scenes(self) -> Iterator[Scene]:
        for pixels, note in zip(self._images, self._image_notes, strict=True):
            things = [Thing(o["name"], o["colour"], "object", o["x"], o["y"], 0.15, 0.15) for o in note["objects"] if o["area"] > _LEAST]
            things.sort(key=lambda t: (int(t.y * 3), int(t.x * 3)))
            yield Scene(np.array(pixels), tuple(things), suite="robot")

    def clips(self) -> Iterator[Clip]:
        for frames, note in zip(self._clips, self._clip_notes, strict=True):
            yield Clip(np.array(frames), (), "robot", note["action"])


def draw(artist: Artist, seed: int, scenes: int, photos: int, clips: int) -> Iterator[Scene | Clip]:
    """`scenes` still scenes, `photos` crops of photos and `clips` clips; each from its own generator, so any order gives the same."""
    for i in range(scenes):
        yield artist.scene(np.random.default_rng((seed, 0, i)))
    for i in range(photos):
        yield artist.photo_scene(np.random.default_rng((seed, 1, i)))
    for i in range(clips):
        yield clip(artist, np.random.default_rng((seed, 2, i)))


def media_of(item: Scene | Clip) -> Media:
    """The pixels of an item as the encoder takes them."""
    if isinstance(item, Clip):
        return Video(torch.from_numpy(item.frames).permute(0, 3, 1, 2), torch.arange(len(item.frames)).float())
    return Image(torch.from_numpy(item.pixels.copy()).permute(2, 0, 1))


def _bare(item: Scene | Clip) -> Sample:
    if isinstance(item, Clip):
        return Sample(None, dataclasses.replace(item, frames=_NOTHING))
    return Sample(dataclasses.replace(item, pixels=_NOTHING), None)


def _note(sample: Sample) -> dict[str, object]:
    if sample.clip is not None:
        return {"clip": {**dataclasses.asdict(dataclasses.replace(sample.clip, frames=_NOTHING)), "frames": None}}
    assert sample.scene is not None
    return {"scene": {**dataclasses.asdict(sample.scene), "pixels": None}}


def _thing(note: dict[str, object]) -> Thing:
    return Thing(**note)  # type: ignore[arg-type]


def _sample(note: dict[str, dict]) -> Sample:  # type: ignore[type-arg]
    if "clip" in note:
        story = note["clip"]
        actors = tuple(
            Actor(_thing(a["thing"]), a["motion"], tuple(a["shown"]), tuple(tuple(p) for p in a["path"])) for a in story["actors"]
        )
        return Sample(None, Clip(_NOTHING, actors, story["story"], story["action"]))
    scene = note["scene"]
    photo = tuple(scene["photo"]) if scene["photo"] else None
    return Sample(Scene(_NOTHING, tuple(map(_thing, scene["things"])), scene["background"], photo, scene["suite"]), None)


def build(
    path: Path, items: Iterator[Scene | Clip], total: int, encoder: VisionEncoder, *, origin: str, batch: int = 16, label: str = "encoding"
) -> Shard:
    """The shard at `path`, mapped from disk; made from the `total` items when it is not there yet, written whole or not at all.

    `origin` says what the items are (a seed, counts). Raises InputError for a shard of another origin.
    """
    notes = path.with_suffix(".json")
    if path.exists() and notes.exists():
        check_origin(path, origin)
        return _read(path, notes)
    shard = encoded(items, total, encoder, batch=batch, label=label)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"features": shard.features, "counts": shard.counts, "grids": shard.grids}
    notes.write_text(json.dumps([_note(s) for s in shard.samples]))
    write(path, tensors, {"origin": origin})
    return _read(path, notes)


def encoded(items: Iterator[Scene | Clip], total: int, encoder: VisionEncoder, *, batch: int = 16, label: str = "encoding") -> Shard:
    """A shard in memory of the `total` items."""
    samples: list[Sample] = []
    rows = _Rows(total)
    with tqdm(total=total, desc=label, unit="img", mininterval=2) as bar:
        for group in _groups(items, batch):
            for tokens in encoder([media_of(item) for item in group]):
                rows.append(tokens)
            samples += [_bare(item) for item in group]
            bar.update(len(group))
    return Shard(tuple(samples), **rows.tensors())


def read(path: Path) -> Shard:
    """The shard that `build` wrote at `path`, whatever its origin. Raises InputError where there is none."""
    notes = path.with_suffix(".json")
    if not path.exists() or not notes.exists():
        raise InputError("there is no shard here; `python -m mmsdk.apps.train_mini` draws and encodes them", item=str(path))
    return _read(path, notes)


def _read(path: Path, notes: Path) -> Shard:
    data = load_file(path)
    try:
        samples = tuple(_sample(n) for n in json.loads(notes.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"does not describe samples ({error!r}); remove it and {path.name}", item=str(notes)) from error
    if len(samples) != len(data["features"]):
        raise InputError(f"has {len(data['features'])} rows, {notes.name} describes {len(samples)}; remove both", item=str(path))
    return Shard(samples, data["features"], data["counts"], data["grids"])


def check_origin(path: Path, origin: str) -> None:
    """Raises InputError for a file of another origin; one that does not say its origin only earns a warning."""
    with safe_open(path, framework="pt") as file:
        found = (file.metadata() or {}).get("origin")
    if found is None:
        warnings.warn(f"{path} does not say what it was made from; it is taken for {origin}", stacklevel=3)
    elif found != origin:
        raise InputError(f"was made from {found}, this run is about {origin}; remove it or choose another folder", item=str(path))


class _Rows:
    """Samples of different lengths in one tensor [rows, most, d], written as they come, so that they are never held twice.

    It is made for the rows announced and the longest sample so far. A longer one widens it: once, where clips follow pictures.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._features = torch.zeros(0, 0, 0, dtype=torch.float16)
        self._counts: list[int] = []
        self._grids: list[tuple[int, int, int]] = []

    def append(self, tokens: VisualTokens) -> None:
        row, (count, width) = len(self._counts), tokens.features.shape
        most = max(count, self._features.shape[1])
        if row >= len(self._features) or most > self._features.shape[1]:
            # NumPy asks for memory that is zero already, which takes none until it is written to.
            roomy = torch.from_numpy(np.zeros((self._total if row < self._total else 2 * row + 1, most, width), np.float16))
            if row:
                roomy[:row, : self._features.shape[1]] = self._features[:row]
            self._features = roomy
        self._features[row, :count] = tokens.features
        self._counts.append(count)
        self._grids.append(tokens.grid)

    def tensors(self) -> dict[str, Tensor]:
        rows = len(self._counts)
        return {"features": self._features[:rows], "counts": torch.tensor(self._counts), "grids": torch.tensor(self._grids)}


def _groups(items: Iterator[Scene | Clip], size: int) -> Iterator[list[Scene | Clip]]:
    group: list[Scene | Clip] = []
    weight = 0
    for item in items:
        group.append(item)
        weight += len(item.frames) if isinstance(item, Clip) else 1
        if weight >= size:
            yield group
            group, weight = [], 0
    if group:
        yield group


def cells_of(sample: Sample, grid: Sequence[int]) -> list[tuple[int, Thing]]:
    """(token index, thing) for every cell of the grid whose centre lies on a thing that is visible there and then."""
    found = []
    t_all, gh, gw = grid
    for t in range(t_all):
        for thing, (x, y) in _visible(sample, t):
            xs = [c for c in range(gw) if abs((c + 0.5) / gw - x) < max(0.42 * thing.w, 0.5 / gw)]
            ys = [r for r in range(gh) if abs((r + 0.5) / gh - y) < max(0.42 * thing.h, 0.5 / gh)]
            found += [((t * gh + r) * gw + c, thing) for r in ys for c in xs]
    return found


def _visible(sample: Sample, t: int) -> Iterator[tuple[Thing, tuple[float, float]]]:
    if sample.scene is not None:
        yield from ((thing, (thing.x, thing.y)) for thing in sample.scene.things)
    else:
        assert sample.clip is not None
        yield from ((a.thing, a.path[t]) for a in sample.clip.actors if a.shown[t])


def place_of_cell(index: int, grid: Sequence[int]) -> tuple[int, str]:
    """(time step, place name) of a token of the grid."""
    _, gh, gw = grid
    within = index % (gh * gw)
    return index // (gh * gw), place_of((within % gw + 0.5) / gw, (within // gw + 0.5) / gh)
