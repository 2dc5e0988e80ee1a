"""What mini's encoder sees of the demonstrations' pictures, once and for all: few numbers a token, in shards on disk.

The encoder's features are projected onto the directions in which the tokens of this training set differ most, each scaled by the fourth
root of its variance: enough of what is rare, a puck among tables, is left to be learned from, and a shard is a sixth as large.
A run that was interrupted goes on with the shards that it has.

Letters: m pictures, c cameras, n tokens of a picture, d numbers of a token, k of these that are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from mmsdk.apps.kept import write
from mmsdk.vision.encode import Encoder
from mmsdk.vision.types import Image, VisualTokens
from mmsdk.vla.heads.minisight import standing

__all__ = ["Basis", "basis", "encoded", "seen", "standings"]

SHARD = 400
_SAMPLED = 24


@dataclass(frozen=True, slots=True)
class Basis:
    """The directions that are kept, and what lies between them; `black` are the tokens of a picture on which nothing is."""

    centre: Float[Tensor, " d"]
    axes: Float[Tensor, "k d"]
    black: Float[Tensor, "n k"]

    def reduced(self, features: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n k"]:
        """As `mmsdk.vla.heads.glance.Glance.reduced`."""
        return torch.nn.functional.linear(features.float() - self.centre, self.axes)


def seen(encoder: Encoder, pictures: UInt8[Tensor, "i 3 h w"]) -> Float[Tensor, "i n d"]:
    """The features of pictures of one size."""
    return torch.stack([each.features.float() for each in encoder([Image(picture) for picture in pictures])])


def standings(encoder: Encoder, pictures: UInt8[Tensor, "c 3 h w"]) -> Float[Tensor, "m p"]:
    """Where the tokens of all cameras stand, side by side: the same for all pictures of a size."""
    tokens: list[VisualTokens] = encoder([Image(picture) for picture in pictures])
    return torch.cat([standing(each, camera, len(tokens)) for camera, each in enumerate(tokens)])


def basis(path: Path, encoder: Encoder, shards: Sequence[Path], kept: int) -> Basis:
    """The directions of a few pictures of each task, found once and then read from `path`."""
    if path.exists():
        return Basis(**load_file(path))
    features = torch.cat([seen(encoder, _some(shard)).flatten(0, 1) for shard in tqdm(shards, desc="directions", unit="task")]).double()
    centre = features.mean(0)
    values, vectors = torch.linalg.eigh((features - centre).T.cov(correction=0))
    values, vectors = values[-kept:].flip(0).clamp_min(1e-12), vectors[:, -kept:].flip(1)
    scale = values.pow(-0.25) / values.sqrt().mean().sqrt()
    axes = (vectors * scale).T.float().contiguous()
    found = Basis(centre.float(), axes, torch.zeros(1, kept))
    with safe_open(shards[0], framework="pt") as file:
        size = file.get_slice("pictures").get_shape()[-2:]
    black = found.reduced(seen(encoder, torch.zeros(1, 3, *size, dtype=torch.uint8)))[0]
    found = Basis(found.centre, axes, black)
    write(path, {"centre": found.centre, "axes": axes, "black": black})
    print(f"{kept} directions hold {float(values.sum() / (features - centre).square().sum(1).mean()):.3f} of the variance", flush=True)
    return found


def encoded(folder: Path, task: str, shard: Path, encoder: Encoder, found: Basis) -> Float[Tensor, "m c n k"]:
    """The reduced features of a task's pictures, in 16 bits; encoded where they are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    with safe_open(shard, framework="pt") as file:
        pictures = file.get_slice("pictures")
        count = pictures.get_shape()[0]
        parts = []
        for number, start in enumerate(tqdm(range(0, count, SHARD), desc=task, unit="shard", mininterval=10)):
            path = folder / f"{task}-{number:03}.safetensors"
            if not path.exists():
                some = pictures[start : start + SHARD]
                features = found.reduced(seen(encoder, some.flatten(0, 1))).unflatten(0, some.shape[:2]).half()
                write(path, {"features": features})
            parts.append(load_file(path)["features"])
    return torch.cat(parts)


def _some(shard: Path) -> UInt8[Tensor, "i 3 h w"]:
    """A few pictures of both cameras, evenly from the whole."""
    with safe_open(shard, framework="pt") as file:
        pictures = file.get_slice("pictures")
        count = pictures.get_shape()[0]
        places = sorted({int(place) for place in torch.linspace(0, count - 1, min(_SAMPLED, count))})
        return torch.cat([pictures[place : place + 1] for place in places]).flatten(0, 1)
