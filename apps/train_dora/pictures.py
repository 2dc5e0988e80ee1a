"""What the actor is trained and judged on: drawn scenes, which things are in each, and a linear probe that tells them.

The frozen encoder's answer to "what is in this picture?" is read patch by patch: a linear map says which thing a patch is part of, or
nothing, and a name is in the picture as surely as it is at the patch that shows it best. A mean over patches would move with every
background patch that is removed, whatever was lost; the best patch is lost only with the thing itself.

Letters: b pictures, m patch tokens of the longest row, s tokens of a row, d width, c names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from mmsdk.apps.kept import write
from mmsdk.apps.train_mini.features import Sample, Shard, cells_of, check_origin
from mmsdk.apps.train_mini.scenes import Artist, Scene, Thing
from mmsdk.apps.train_mini.vocabulary import OBJECTS, SHAPES
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.vit import ViT, ViTOutput

__all__ = ["NAMES", "Cells", "Drawn", "Probe", "cells", "cells_of_shard", "divergence", "fit", "judged", "recall"]

NAMES = (*(kind.name for kind in OBJECTS), *SHAPES, "word", "number")
_SIDE = 224
_NOTHING_PER_PICTURE = 24


@dataclass(frozen=True, slots=True)
class Drawn:
    """Square scenes by number, each a pure function of the seed and its number, so that no pixels are stored."""

    artist: Artist
    seed: int

    def __call__(self, numbers: range | list[int]) -> tuple[UInt8[Tensor, "b 3 224 224"], Float[Tensor, "b c"]]:
        """Pixels, and 1 for every name that is in the picture."""
        scenes = [self.scene(number) for number in numbers]
        labels = torch.zeros(len(scenes), len(NAMES))
        for row, scene in enumerate(scenes):
            labels[row, [_name(thing) for thing in scene.things]] = 1.0
        return pixels_of(scenes), labels

    def scene(self, number: int) -> Scene:
        """One scene."""
        rng = np.random.default_rng((self.seed, number))
        # a batch has one grid: scenes of other shapes are drawn again
        while (scene := self.artist.scene(rng)).pixels.shape[:2] != (_SIDE, _SIDE):
            pass
        return scene


def pixels_of(scenes: list[Scene]) -> UInt8[Tensor, "b 3 h w"]:
    """The pixels of scenes of one size."""
    return torch.from_numpy(np.stack([scene.pixels for scene in scenes])).permute(0, 3, 1, 2)


def _name(thing: Thing) -> int:
    return NAMES.index(thing.name if thing.kind in ("object", "shape") else thing.kind)


@dataclass(frozen=True, slots=True)
class Cells:
    """Patches as the whole transformer gives them, and the number of the thing that each is part of: that of NAMES, c for nothing."""

    states: Float[Tensor, "n d"]
    name: Int[Tensor, " n"]


@torch.no_grad()
def cells(path: Path, vit: ViT, drawn: Drawn, count: int, batch: int = 8) -> Cells:
    """All patches on things of the first `count` scenes and some of nothing; from the file if it is there, else written to it."""
    origin = f"seed {drawn.seed}: cells of {count} square scenes, held out: {drawn.artist.held_out}"
    if path.exists():
        check_origin(path, origin)
        return Cells(**load_file(path))
    states, names, fit_in = list[Tensor](), list[Tensor](), Preprocess()
    for start in tqdm(range(0, count, batch), desc="patches for the probe", unit="batch", mininterval=5):
        scenes = [drawn.scene(number) for number in range(start, min(count, start + batch))]
        tokens = vit(fit_in(pixels_of(scenes)).to(vit.position.dtype)).tokens
        side = round(tokens.shape[1] ** 0.5)
        for scene, own in zip(scenes, tokens, strict=True):
            chosen, name = _chosen(Sample(scene, None), (1, side, side), len(states))
            states.append(own[chosen])
            names.append(name)
    found = {"states": torch.cat(states), "name": torch.cat(names)}
    write(path, found, {"origin": origin})
    return Cells(**found)


def cells_of_shard(shard: Shard, width: int) -> Cells:
    """The same of mini's training pictures, whose final states are the first `width` of their features."""
    states, names = list[Tensor](), list[Tensor]()
    for i, (sample, grid) in enumerate(zip(shard.samples, shard.grids.tolist(), strict=True)):
        if sample.scene is not None and sample.scene.photo is None:
            chosen, name = _chosen(sample, grid, i)
            states.append(shard.features[i, chosen, :width])
            names.append(name)
    return Cells(torch.cat(states), torch.cat(names))


def _chosen(sample: Sample, grid: Sequence[int], seed: int) -> tuple[Int[Tensor, " k"], Int[Tensor, " k"]]:
    """All cells on things and some on nothing, and their names."""
    name = torch.full((grid[0] * grid[1] * grid[2],), len(NAMES))
    for cell, thing in cells_of(sample, grid):
        name[cell] = _name(thing)
    nothing = (name == len(NAMES)).nonzero()[:, 0]
    some = nothing[torch.randperm(len(nothing), generator=torch.Generator().manual_seed(seed))[:_NOTHING_PER_PICTURE]]
    chosen = torch.cat(((name < len(NAMES)).nonzero()[:, 0], some))
    return chosen, name[chosen]


@dataclass(frozen=True, slots=True)
class Probe:
    """Standardises patch states and maps them to a logit for each name and, last, for nothing."""

    mean: Float[Tensor, " d"]
    scale: Float[Tensor, " d"]
    weight: Float[Tensor, "k d"]
    bias: Float[Tensor, " k"]

    def patches(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b c"]:
        """The log-odds of each name at each patch."""
        logp = F.linear((states.float() - self.mean) / self.scale, self.weight, self.bias).log_softmax(dim=-1)[..., :-1]
        return logp - torch.log1p(-logp.exp().clamp_max(1 - 1e-6))

    def __call__(self, states: Float[Tensor, "b m d"], there: Bool[Tensor, "b m"]) -> Float[Tensor, "b c"]:
        """The log-odds of each name in each picture: those of the patch that shows it best. `there` is False behind a shorter row."""
        found: Tensor = self.patches(states).masked_fill(~there[..., None], -torch.inf).amax(dim=1)
        return found

    def save(self, path: Path) -> None:
        """Write it."""
        save_file({field.name: getattr(self, field.name) for field in fields(self)}, path)


def fit(seen: Cells, kinds: int = len(NAMES) + 1, steps: int = 600, batch: int = 1024, seed: int = 0) -> Probe:
    """A probe by AdamW on the cross-entropy of patches."""
    states, generator = seen.states.float(), torch.Generator().manual_seed(seed)
    mean, scale = states.mean(dim=0), states.std(dim=0).clamp_min(1e-6)
    weight = (torch.randn(kinds, states.shape[1], generator=generator) * 1e-3).requires_grad_()
    bias = torch.zeros(kinds, requires_grad=True)
    optimiser = torch.optim.AdamW([weight, bias], lr=5e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(len(states), (batch,), generator=generator)
        loss = F.cross_entropy(F.linear((states[chosen] - mean) / scale, weight, bias), seen.name[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return Probe(mean, scale, weight.detach(), bias.detach())


def judged(probe: Probe, out: ViTOutput) -> Float[Tensor, "b c"]:
    """The probe's answer to what a transformer gave."""
    return probe(out.tokens, out.groups.size[:, out.groups.first :] > 0)


def recall(logits: Float[Tensor, "b c"], labels: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """The probe's accuracy on each picture: of its k names, the share that is among the k most probable."""
    k = labels.sum(dim=1, keepdim=True)
    order = logits.argsort(dim=1, descending=True, stable=True)
    first = torch.arange(logits.shape[1], device=logits.device) < k
    return (labels.gather(1, order) * first).sum(dim=1) / k[:, 0]


def divergence(dense: Float[Tensor, "b c"], logits: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """KL(dense || pruned) of the predictions, summed over the names' Bernoulli distributions, in nats."""
    p = dense.sigmoid()
    yes = p * (F.logsigmoid(dense) - F.logsigmoid(logits))
    no = (1 - p) * (F.logsigmoid(-dense) - F.logsigmoid(-logits))
    return (yes + no).sum(dim=1)
