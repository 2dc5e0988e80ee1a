"""Video diffusion: sparse attention beside dense, orders of rows in a model of a GPU's cache, and whole clips made faster.

mmsdk bench video                                        attention and orders of rows, over made latents
mmsdk bench video:model=build/train_video                with what `python -m mmsdk.apps.train_video` trained: drift, whole clips, too
mmsdk bench video:kind=world,world=build/train_world     what a memory of worlds brings back, with a model of --kind world, too
mmsdk bench video:model=...,saved=video.jsonl            writes each row there when it is done, and goes on from there
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from mmsdk import plugins
from mmsdk.apps.console import Cell
from mmsdk.apps.memory.saved import resumed
from mmsdk.apps.video import ordering, remembering
from mmsdk.apps.video.attention import METHODS, attention
from mmsdk.apps.video.drift import drift
from mmsdk.apps.video.trials import WAYS, Trials
from mmsdk.diffusion.attention.types import Grid
from mmsdk.errors import InputError

__all__ = ["Video"]

_OF_MODEL = ("ress", "generation", "cache", "two_stage")
_WAYS = {f"{way.kind} {way.name}": way for way in WAYS}
_MASKS = ("svg2:query_centroids=64,key_centroids=128", "sparge:topk=0.25", "nabla:mass=0.7", "draft")


@dataclass(frozen=True, slots=True)
class Video:
    """Attention over made latents of frames x height x width tokens: smooth fields and places, of which each head looks at another mixture.

    `methods` are all, or names joined by "+"; "random-64" and "random-128" read a fifth of the blocks of that size, drawn. The cache model
    runs masks of `wave_tokens` tokens in blocks of 128 with the sizes of an H100. `model` is a folder of `mmsdk.apps.train_video`, of which
    `clips` held-out sentences are made into clips of `steps` steps; without one, kinds that need it are left out. `kind` is one kind alone.
    `world` is a folder of `mmsdk.apps.train_video --kind world`; `world_frames` pages are planted without one. `saved` is a file for the
    rows that are done.
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
    seed: int = 0
    saved: str = ""

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {kind, method, sparsity, tokens, speedup, seconds, rel_l2, psnr, agreement, l2_hit, l2_hit_unordered, ...}.

        Attention: see `mmsdk.apps.video.attention`. Wavealign: seconds in which the rows were put in order, and the cache's hit ratios.
        World: `recall`, see `mmsdk.apps.video.remembering`. Ress: error of what layers add to the stream. Generation, cache, two_stage: of
        whole clips, `agreement` the share of which the judge reads colour, shape and direction as they were asked for. Raises InputError
        for sizes that cannot be, and for a kind that needs a model where none is named.
        """
        for name in ("heads", "head_dim", "repeats", "wave_tokens", "wave_heads", "clips", "steps", "world_frames"):
            if getattr(self, name) < 1:
                raise InputError(f"it is {getattr(self, name)}, it must be at least 1", item=name)
        if self.kind in _OF_MODEL and not self.model:
            how = "train one with `python -m mmsdk.apps.train_video`, and name its folder: model=build/train_video"
            raise InputError(f"it is measured on a model; {how}", item=self.kind)
        trials = Trials(Path(self.model), getattr(torch, self.dtype), self.clips, self.steps)
        suites, measure = self._suites(), partial(self._suite, trials)
        with torch.no_grad():
            if self.saved:
                return resumed(Path(self.saved), repr(dataclasses.replace(self, kind="all", saved="")), suites, measure)
            return [row for suite in suites for row in measure(suite)]

    def _suites(self) -> list[str]:
        """What is measured as one, in order: "attention", "wavealign", "ress", and one for each way to make clips."""
        of_model = ["ress", *_WAYS] if self.model else []
        worlds = ["world planted", *(["world returns"] if self.world else [])]
        return [suite for suite in ("attention", "wavealign", *worlds, *of_model) if self.kind in ("all", suite.split()[0])]

    def _suite(self, trials: Trials, suite: str) -> Iterator[dict[str, Cell]]:
        if suite == "attention":
            grid = Grid(self.frames, self.height, self.width)
            names = ["random-64", "random-128", *plugins.available(METHODS)] if self.methods == "all" else self.methods.split("+")
            yield from attention(grid, self.heads, self.head_dim, getattr(torch, self.dtype), names, self.repeats, self.seed)
        elif suite == "wavealign":
            yield from ordering.of_patterns(self.wave_tokens, self.wave_heads, self.seed)
            yield from ordering.of_model(trials.seen(), _MASKS, self.wave_tokens) if self.model else ()
        elif suite == "world planted":
            yield from remembering.planted(self.world_frames, self.seed)
        elif suite == "world returns":
            yield from remembering.returns(Path(self.world) / "model", self.clips)
        elif suite == "ress":
            yield from drift(trials.seen())
        else:
            yield trials.row(_WAYS[suite])
