"""What sparse attention does to the residual stream of a model: blocks chosen by their drift beside blocks chosen by their attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk.apps.video.rows import Row, row
from mmsdk.diffusion.attention.attend import attend
from mmsdk.diffusion.attention.blocks import kept_most, pooled, scores
from mmsdk.diffusion.attention.methods.ress import Ress
from mmsdk.diffusion.attention.types import Blocks, Place, Selection
from mmsdk.diffusion.caching import Caching, step_cache
from mmsdk.diffusion.generate import Denoiser
from mmsdk.diffusion.imagine import Imaginer
from mmsdk.diffusion.schedule import flow
from mmsdk.diffusion.types import Attend, Spot

__all__ = ["Seen", "drift", "seen"]

_SPARSITIES = (0.5, 0.73, 0.85, 0.93)


@dataclass(frozen=True, slots=True)
class Seen:
    """What an attention of a model was given, at one step."""

    query: Float[Tensor, "b h s d"]
    keys: Float[Tensor, "b h s d"]
    values: Float[Tensor, "b h s d"]
    place: Place


@dataclass(frozen=True, slots=True)
class _Watching:
    """Dense attention, and what it was given at one step with the text."""

    at_step: int
    kept: list[Seen] = field(default_factory=list)

    def at(self, step: int, steps: int, branch: str) -> Attend:
        def watched(query: Tensor, keys: Tensor, values: Tensor, spot: Spot) -> Tensor:
            if step == self.at_step and branch == "cond":
                place = Place(spot.grid, step, steps, spot.layer, spot.layers, projection=spot.projection.float())
                self.kept.append(Seen(query.float(), keys.float(), values.float(), place))
            return F.scaled_dot_product_attention(query, keys, values)

        return watched


def seen(imagine: Imaginer, text: str, seed: int, steps: int, step: int) -> list[Seen]:
    """What each layer attends over at a step of a generation, which goes no further."""
    watching, schedule = _Watching(step), flow(steps, imagine.screen.shift)
    condition, guidance = imagine.asked(text)
    denoiser = Denoiser(imagine.model, condition, guidance, steps, watching, Caching(step_cache("none")))
    latents = imagine.noise(torch.Generator().manual_seed(seed))
    for number in range(step + 1):
        latents = schedule.step(latents, denoiser.velocity(latents, schedule.time(number), number), number)
    return watching.kept


def drift(layers: Sequence[Seen]) -> Iterator[Row]:
    """Rows of both choices at equal numbers of blocks: the error of what the layers add to the stream, the mean over the layers."""
    for sparsity in _SPARSITIES:
        for name in ("ress", "attention mass"):
            found = [_drifted(layer, sparsity, name) for layer in layers]
            errors, densities = zip(*found, strict=True)
            yield row("ress", name, layers[0].query.shape[2], 1 - sum(densities) / len(densities)) | {"rel_l2": sum(errors) / len(errors)}


def _drifted(layer: Seen, sparsity: float, name: str) -> tuple[float, float]:
    choice = _chosen(layer, sparsity, name)
    dense = F.scaled_dot_product_attention(layer.query, layer.keys, layer.values)
    one, other = (_projected(layer, heads) for heads in (attend(layer.query, layer.keys, layer.values, choice), dense))
    return float((one - other).norm() / other.norm()), choice.density()


def _chosen(layer: Seen, sparsity: float, name: str) -> Selection:
    assert layer.place.projection is not None
    method, special = Ress(sparsity), layer.place.grid.text(layer.query.device)
    restored = method.selection(layer.query, layer.keys, layer.values, layer.place.projection, special)
    if name == "ress":
        return restored
    blocks = Blocks(method.block, layer.query.shape[2])
    count = int(restored.mask[0, 0, 0].sum())
    shares = scores(pooled(layer.query, blocks), pooled(layer.keys, blocks)).softmax(-1)
    return Selection(kept_most(shares, count), blocks, blocks)


def _projected(layer: Seen, heads: Float[Tensor, "b h s d"]) -> Float[Tensor, "b s e"]:
    return torch.einsum("bhsd,hed->bse", heads, layer.place.projection)
