"""Video diffusion: sparse attention beside dense, orders of rows in a model of a GPU's cache, and whole clips made faster.

mmsdk bench video                                        attention, orders of rows, a memory of worlds: what needs no trained model
mmsdk bench video:model=build/train_video                with what `python -m mmsdk.apps.train_video` trained: drift, whole clips, too
mmsdk bench video:kind=world,world=build/train_world     what a memory of worlds brings back, with a model of --kind world, too
mmsdk bench video:saved=video.jsonl                      writes each part there when it is done, and goes on from there, also with models
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

import torch
from tqdm import tqdm

from mmsdk.apps.console import Cell
from mmsdk.apps.memory.saved import resumed
from mmsdk.apps.video import ordering, remembering
from mmsdk.apps.video.attention import Latents, attended, settings
from mmsdk.apps.video.drift import Seen, drift
from mmsdk.apps.video.trials import WAYS, Trials
from mmsdk.diffusion.attention.types import Grid
from mmsdk.errors import InputError

__all__ = ["Video"]

_OF_MODEL = ("ress", "generation", "cache", "two_stage")
_WAYS = {f"{way.kind} {way.name}": way for way in WAYS}
# Made latents look at other mixtures in so many heads.
_HEADS = 12
_MASKS = ("svg2:query_centroids=64,key_centroids=128", "sparge:topk=0.25", "nabla:mass=0.7", "draft")


@dataclass(frozen=True, slots=True)
class Video:
    """Attention over made latents of frames x height x width tokens: smooth fields and places, of which each head looks at another mixture.

    `methods` are all, or names joined by "+"; "random-64" and "random-128" read a fifth of the blocks of that size, drawn. The cache model
    runs masks of `wave_tokens` tokens in blocks of 128 with the sizes of an H100. `model` is a folder of `mmsdk.apps.train_video`, of which
    `clips` held-out sentences are made into clips of `steps` steps; without one, kinds that need it are left out. `kind` is one kind alone.
    `world` is a folder of `mmsdk.apps.train_video --kind world`; `world_frames` pages are planted without one, and a world goes on for
    `endless` frames, of a model that was taught nothing where there is none. `saved` is a file for the parts that are done; those of a
    model may come later, and are told from those of another.
    """

    frames: int = 16
    height: int = 32
    width: int = 32
    heads: int = 2
    head_dim: int = 64
    dtype: Literal["float32", "bfloat16"] = "float32"
    methods: str = "all"
    kind: Literal["all", "attention", "wavealign", "ress", "generation", "cache", "two_stage", "world"] = "all"
    repeats: int = 3
    wave_tokens: int = 118272
    wave_heads: int = 4
    model: str = ""
    clips: int = 4
    steps: int = 20
    world: str = ""
    world_frames: int = 200
    endless: int = 1000
    seed: int = 0
    saved: str = ""

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {kind, method, sparsity, tokens, speedup, seconds, rel_l2, psnr, agreement, l2_hit, l2_hit_unordered, ...}.

        Attention: see `mmsdk.apps.video.attention`. Wavealign: seconds in which the rows were put in order, and the cache's hit ratios.
        World: `recall`, see `mmsdk.apps.video.remembering`. Ress: error of what layers add to the stream. Generation, cache, two_stage: of
        whole clips, `agreement` the share of which the judge reads colour, shape and direction as they were asked for. Raises InputError
        for sizes that cannot be, and for a kind that needs a model where none is named.
        """
        for name in ("heads", "head_dim", "repeats", "wave_tokens", "wave_heads", "clips", "steps", "world_frames", "endless"):
            if getattr(self, name) < 1:
                raise InputError(f"it is {getattr(self, name)}, it must be at least 1", item=name)
        if self.kind in _OF_MODEL and not self.model:
            how = "train one with `python -m mmsdk.apps.train_video`, and name its folder: model=build/train_video"
            raise InputError(f"it is measured on a model; {how}", item=self.kind)
        if not Path(self.saved).parent.is_dir():
            # known now, not in half an hour
            raise InputError(f"there is no folder {Path(self.saved).parent}; make it, or name another file", item="saved")
        suites = self._suites()
        with torch.no_grad(), tqdm(total=len(suites), desc="video", unit="part", mininterval=2) as bar:
            measure = partial(self._suite, self._latents(), self._trials(), bar)
            if not self.saved:
                return [row for suite in suites for row in measure(suite)]
            same = dataclasses.replace(self, kind="all", methods="all", model="", world="", saved="")
            return resumed(Path(self.saved), repr(same), suites, measure)

    def _suites(self) -> list[str]:
        """What is measured as one, in order; those of a model end with its folder, so that a file may hold those of several."""
        free = [*(f"attention {name}" for name in settings(self.methods)), "wavealign patterns", "wavealign latents", "world planted"]
        of_model = ["wavealign model", "ress", *_WAYS] if self.model else []
        worlds = [f"world endless of {self.world or 'nothing'}", *([f"world returns of {self.world}"] if self.world else [])]
        suites = [*free, *worlds, *(f"{suite} of {self.model}" for suite in of_model)]
        return [suite for suite in suites if self.kind in ("all", suite.split()[0])]

    def _latents(self) -> Latents:
        return Latents(Grid(self.frames, self.height, self.width), self.heads, self.head_dim, getattr(torch, self.dtype), self.seed)

    def _trials(self) -> Trials:
        return Trials(Path(self.model), getattr(torch, self.dtype), self.clips, self.steps)

    def _suite(self, latents: Latents, trials: Trials, bar: "tqdm[NoReturn]", suite: str) -> Iterator[dict[str, Cell]]:
        if not bar.n:
            # what a file held takes no time
            bar.initial = bar.n = self._suites().index(suite)
        bar.set_postfix_str(suite)
        name, _, _ = suite.partition(" of ")
        kind, _, rest = name.partition(" ")
        if kind == "attention":
            yield from attended(latents, rest, self.repeats)
        elif kind == "wavealign":
            yield from self._ordered(rest, latents, trials)
        elif kind == "world":
            yield from self._remembered(rest)
        elif kind == "ress":
            yield from drift(trials.seen())
        else:
            yield trials.row(_WAYS[name])
        bar.update()

    def _ordered(self, what: str, latents: Latents, trials: Trials) -> Iterator[dict[str, Cell]]:
        if what == "patterns":
            return ordering.of_patterns(self.wave_tokens, self.wave_heads, self.seed)
        if what == "model":
            return ordering.of_layers("in the model", trials.seen(), _MASKS, self.wave_tokens)
        many = dataclasses.replace(latents, heads=_HEADS)
        return ordering.of_layers("on made latents", [Seen(*many.tensors, many.place)], _MASKS, self.wave_tokens)

    def _remembered(self, what: str) -> Iterator[dict[str, Cell]]:
        world = Path(self.world) / "model" if self.world else None
        if what == "planted":
            return remembering.planted(self.world_frames, self.seed)
        if what == "endless" or world is None:
            return remembering.endless(world, self.endless, self.seed)
        return remembering.returns(world, self.clips)
