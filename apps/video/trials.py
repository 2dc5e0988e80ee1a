"""What makes a whole generation faster, held against dense clips of the same sentences and seeds, and read by the judge.

Sparse attention, step caches, first steps at half the size, and all together. A trial's clips are made one after another, each beside the
time that its dense one took.
"""

import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from mmsdk import plugins
from mmsdk.apps.train_video.judge import Judge, open_judge
from mmsdk.apps.train_video.score import asked, told
from mmsdk.apps.video.attention import METHODS
from mmsdk.apps.video.drift import Seen, seen
from mmsdk.apps.video.rows import Row, psnr, rel_l2, row
from mmsdk.diffusion.attention.types import Choice, Everything, Place, Selector
from mmsdk.diffusion.clip import Clip
from mmsdk.diffusion.imagine import Imaginer, open_imaginer
from mmsdk.diffusion.magnitudes import measured
from mmsdk.diffusion.schedule import flow

__all__ = ["WAYS", "Trials", "Way"]

Kind = Literal["generation", "cache", "two_stage"]


@dataclass(frozen=True, slots=True)
class Way:
    """How clips are made; `coarse` is a share of the steps. A magcache without ratios is given those of the model."""

    kind: Kind
    attention: str = "dense"
    cache: str = "none"
    coarse: float = 0.0

    @property
    def name(self) -> str:
        """What differs from dense, as one would ask for it."""
        coarse = f"coarse {self.coarse:.2g}" if self.coarse else ""
        return " + ".join(part for part in (self.attention, self.cache, coarse) if part not in ("dense", "none", "")) or "dense"


def _sparse(*methods: str) -> list[Way]:
    return [Way("generation", method) for method in methods]


# Steps that the published settings leave dense are of 50; clusters and tiles are of ten times as many tokens. Both go by the clip here.
WAYS = [
    *_sparse("dense", "svg:share=0.3", "svg:share=0.2", "svg2:query_centroids=64,key_centroids=128"),
    *_sparse("svg2:query_centroids=64,key_centroids=128,mass=0.7", "sparge:topk=0.5", "sparge:topk=0.25", "vsa:sparsity=0.7", "vsa"),
    *_sparse("sta:tile_frames=4,tile_height=4,tile_width=4", "radial:dense_steps=4", "radial:dense_steps=4,decay_factor=0.5", "nabla"),
    *_sparse("nabla:mass=0.7", "xattention", "xattention:threshold=0.7", "vmoba:dense_steps=4,spatial_width=4,both_width=4"),
    *_sparse("draft:sparsity=0.7", "draft", "ress", "ress:sparsity=0.85"),
    *[Way("cache", cache=cache) for cache in ("first_block:0.05", "first_block:0.15", "teacache:0.1", "teacache:0.3")],
    *[Way("cache", cache=cache) for cache in ("taylorseer:2", "taylorseer:4", "magcache:0.06", "magcache:0.2")],
    *[Way("two_stage", coarse=share) for share in (0.25, 0.5, 0.75)],
    Way("two_stage", "ress", coarse=0.5),
    Way("two_stage", cache="taylorseer:2", coarse=0.5),
    *[Way("two_stage", attention, "taylorseer:2", share) for attention, share in (("ress", 0.5), ("dense", 0.75), ("ress", 0.75))],
]


@dataclass(frozen=True, slots=True)
class _Made:
    clip: Clip
    seconds: float


@dataclass(frozen=True, slots=True)
class _Counted:
    """A method, and how much of the matrix it had computed each time it was asked."""

    selector: Selector
    densities: list[float] = field(default_factory=list)

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], place: Place
    ) -> Choice:
        choice = self.selector(query, keys, values, place)
        self.densities.append(1.0 if isinstance(choice, Everything) else choice.density())
        return choice


class Trials:
    """What `mmsdk.apps.train_video` wrote into a folder, tried on held-out sentences; it is read, and dense clips are made, when needed."""

    def __init__(self, folder: Path, dtype: torch.dtype, clips: int, steps: int) -> None:
        self._folder, self._dtype, self._steps = folder, dtype, steps
        self._stories = asked(clips)
        self._texts = self._stories.captions()

    @cached_property
    def _imagine(self) -> Imaginer:
        return open_imaginer(self._folder / "model", self._dtype)

    @cached_property
    def _judge(self) -> Judge:
        return open_judge(self._folder / "judge.safetensors")

    @cached_property
    def _dense(self) -> list[_Made]:
        self._made(Way("generation"), 0, "dense")  # what is done but once is done
        numbers = tqdm(range(len(self._texts)), desc="dense", unit="clip", mininterval=2)
        return [self._made(Way("generation"), number, "dense") for number in numbers]

    @cached_property
    def _ratios(self) -> str:
        (condition, _), noise = self._imagine.asked(self._texts[0]), self._imagine.noise(torch.Generator().manual_seed(0))
        found = measured(self._imagine.model, noise, condition, flow(self._steps, self._imagine.screen.shift))
        return " ".join(f"{ratio:.5f}" for ratio in found)

    def seen(self) -> list[Seen]:
        """What the layers attend over half-way through the first sentence's clip."""
        return seen(self._imagine, self._texts[0], 0, self._steps, self._steps // 2)

    def row(self, way: Way) -> Row:
        """Of all clips: seconds of one, the speed-up over dense, errors, and the share of which the judge reads what was asked for."""
        dense, made, sparsity = self._dense, self._dense, None
        if way.attention != "dense":
            counted = _Counted(_loaded(way.attention))
            made = [self._made(way, number, counted) for number in range(len(self._texts))]
            sparsity = 1 - sum(counted.densities) / len(counted.densities)
        elif way.name != "dense":
            made = [self._made(way, number, "dense") for number in range(len(self._texts))]
        clips, plain = (torch.cat([one.clip.latents.float() for one in some]) for some in (made, dense))
        taken, skipped = sum(one.seconds for one in made), sum(sum(one.clip.cost.skipped.values()) for one in made)
        read = told(self._judge.read(clips), self._stories)
        return row(way.kind, way.name, self._imagine.model.grid(clips).video, sparsity) | {
            "speedup": sum(one.seconds for one in dense) / taken,
            "seconds": taken / len(made),
            "rel_l2": rel_l2(clips, plain),
            "psnr": psnr(clips, plain, 2.0),
            "agreement": read.three,
            "steady": read.steady,
            "skipped": skipped / sum(one.clip.cost.passes for one in made),
            "clips": len(made),
        }

    def _made(self, way: Way, number: int, attention: str | Selector) -> _Made:
        cache = f"{way.cache},ratios={self._ratios}" if way.cache.startswith("magcache") else way.cache
        coarse, started = round(way.coarse * self._steps), time.perf_counter()
        clip = self._imagine(self._texts[number], seed=number, steps=self._steps, coarse=coarse, attention=attention, cache=cache)
        return _Made(clip, time.perf_counter() - started)


def _loaded(method: str) -> Selector:
    selector = plugins.load(METHODS, method)
    assert isinstance(selector, Selector)
    return selector
