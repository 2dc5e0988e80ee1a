"""VLA-Cache: of what the cameras see again, keys and values are used again (Xu et al., arXiv 2502.02175).

Published: a visual token is still where the pixels of its patch have a cosine of at least .996 to those of the frame before; of these the
150 most alike at most; of them the 120 visual tokens that words attended to most, in layer 15 of the frame before, are computed all the
same. What is left is reused in a share of each layer that follows from the entropy of attention there: the sharper it is, the more; where
the share rises from layer to layer it rises by .55 of that. Prompt and positions must be the same.

Reconstruction: a patch is compared with what it was when its token was last computed, so that slow motion adds up; a token that was left
out in one layer cannot come back in a later one, so that shares never fall, and the most alike go first; entropies, of what words attend to
among visual tokens, go from 0 to 1 between the sharpest and the flattest layer, as they were in the frame before; words are always
computed. A patch of zeros is like another one. Note what the cosine does not see: a plain patch that grows darker.

The encoder sees every frame whole; what is saved is of the decoder. Letters as in `mmsdk.vla.flow_model`: b = 1 row, c cameras, n visual
tokens, s words, t both, l layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isqrt, log
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError
from mmsdk.kv.read import ReadCache
from mmsdk.kv.received import received
from mmsdk.kv.renewed import RenewedCache
from mmsdk.kv.slots import positions_of
from mmsdk.kv.types import LayerView
from mmsdk.stages import Context
from mmsdk.vla.flow_model import FlowModel
from mmsdk.vla.types import ActionChunk, Request

__all__ = ["Reuse", "StillModel", "StillSight", "alike", "shares"]


@runtime_checkable
class Eyes(Protocol):
    """What sees and reads: `PaliGemma` or `SmolVLM` of `mmsdk.vla.heads`."""

    @property
    def decoder(self) -> Decoder: ...

    def see(self, pixels: Float[Tensor, "b c 3 h w"]) -> Float[Tensor, "b n d"]: ...


@dataclass(frozen=True, slots=True)
class Reuse:
    """The published numbers, which are for 256 tokens. Raises InputError for counts and shares that cannot be.

    `look` is the layer whose attention says what matters, or the last where there are fewer.
    """

    similar: float = 0.996
    most: int = 150
    relevant: int = 120
    look: int = 15
    growth: float = 0.55

    def __post_init__(self) -> None:
        if min(self.most, self.relevant, self.look) < 0 or not 0 <= self.growth <= 1:
            raise InputError(f"{self}: counts are at least 0, growth is in [0, 1]", item="reuse")

    def still(self, similar: Float[Tensor, " n"], attended: Float[Tensor, " n"]) -> Int[Tensor, " m"]:
        """The tokens that may be reused, the most alike first."""
        likest = similar.argsort(descending=True, stable=True)[: self.most]
        matters = torch.zeros_like(similar, dtype=torch.bool)
        matters[attended.argsort(descending=True, stable=True)[: self.relevant]] = True
        return likest[(similar[likest] >= self.similar) & ~matters[likest]]


@dataclass(frozen=True, slots=True)
class _Before:
    """The frame before: what it was of, each token's pixels when it was last computed, what it left, and where words looked."""

    told: tuple[Tensor, ...]
    patches: Float[Tensor, "n p"]
    entries: tuple[tuple[Tensor, Tensor], ...]
    attended: Float[Tensor, " n"]
    shares: tuple[float, ...]

    def fits(self, patches: Float[Tensor, "n p"], told: tuple[Tensor, ...]) -> bool:
        """Whether the next frame has the same cameras and words, and so the same places."""
        return patches.shape == self.patches.shape and all(map(torch.equal, told, self.told))

    def reusable(self, patches: Float[Tensor, "n p"], reuse: Reuse) -> tuple[Int[Tensor, " m"], list[int]]:
        """The tokens of the next frame that may be reused, and of how many of them each layer does so."""
        still = reuse.still(alike(self.patches, patches), self.attended)
        return still, [int(share * len(still)) for share in self.shares]


class StillSight:
    """A `mmsdk.vla.flow_model.Sight` of one episode, for one row. A frame that is refused leaves it as it was."""

    def __init__(self, eyes: Eyes, reuse: Reuse = Reuse()) -> None:
        self.eyes, self.reuse = eyes, reuse
        self.reused = 0.0
        self._before: tuple[_Before, ...] = ()

    def reset(self) -> None:
        """A new episode: the next frame is read whole."""
        self._before, self.reused = (), 0.0

    @torch.no_grad()
    def prefix(
        self,
        pixels: Float[Tensor, "b c 3 h w"],
        present: Bool[Tensor, "b c"],
        ids: Int[Tensor, "b s"],
        said: Bool[Tensor, "b s"],
        room: int = 0,
    ) -> Context:
        """What the decoder knows after c camera images and the words, much of it from the frame before; `reused` is then the share of
        visual tokens, mean over layers, that was not computed.

        Raises InputError for more than one row, and for cameras whose tokens are no square.
        """
        decoder = self.eyes.decoder
        pixels, present, ids, said = (given.to(decoder.embedding.weight.device) for given in (pixels, present, ids, said))
        if len(pixels) != 1:
            raise InputError(f"there are {len(pixels)} rows; a robot has one memory of what it saw", item="VLA-Cache")
        sight = self.eyes.see(pixels)
        shown = present.repeat_interleave(sight.shape[1] // present.shape[1], dim=1)
        words = decoder.embed(ids)
        reading = _Pass(torch.cat((sight.to(words.dtype), words), dim=1), torch.cat((shown, said), dim=1), sight.shape[1])
        patches, told = _patches(pixels, sight.shape[1]), (present, ids, said)
        before = [each for each in self._before if each.fits(patches, told)]
        still, counts = before[0].reusable(patches, self.reuse) if before else (patches.new_zeros(0).long(), [0] * decoder.config.layers)
        cache, hidden = reading.run(decoder, [each.entries for each in before], still, counts)
        for each in before:
            # of what is not computed in every layer the old pixels count
            old = still[: counts[-1]]
            patches = patches.index_copy(0, old, each.patches[old])
        attended = reading.attended[min(self.reuse.look, len(reading.attended) - 1)]
        self._before = (_Before(told, patches, cache.entries, attended, shares(reading.entropies, self.reuse.growth)),)
        self.reused = sum(counts) / (len(counts) * sight.shape[1])
        return Context(hidden, ReadCache.at(cache, decoder.config.layers))


@dataclass(slots=True)
class _Pass:
    """One pass of [pictures ; words] both ways, layer by layer, and what words looked at meanwhile."""

    embeddings: Float[Tensor, "1 t d"]
    valid: Bool[Tensor, "1 t"]
    visual: int
    attended: list[Tensor] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)

    def run(
        self, decoder: Decoder, entries: Sequence[Sequence[tuple[Tensor, Tensor]]], still: Int[Tensor, " m"], counts: list[int]
    ) -> tuple[RenewedCache, Float[Tensor, "1 d"]]:
        """The cache behind it, and the output at the last valid token. Of layer l the first `counts[l]` still tokens stay as they were."""
        config, x = decoder.config, self.embeddings
        if entries:
            cache = RenewedCache(self.valid, entries[0], self._look)
        else:
            cache = RenewedCache.empty(self.valid, config.layers, config.kv_heads, config.head_dim, x, self._look)
        positions, places = positions_of(self.valid), torch.arange(x.shape[1], device=x.device)
        for layer, count in enumerate(counts):
            stays = torch.isin(places, still[:count])
            x, places = x[:, ~stays], places[~stays]
            cache.renew(places)
            seen = self.valid[:, None, None, :] & self.valid[:, places][:, None, :, None]
            x, _ = decoder.run(x, positions[:, places], cache, range(layer, layer + 1), seen)
        last = positions.argmax(1)
        at = int((places == last[0]).nonzero()[0, 0])
        return cache, decoder.norm(x)[:, at]

    def _look(self, layer: int, query: Tensor, view: LayerView) -> None:
        """What words attend to among visual tokens: they are the last queries there are."""
        words = self.valid.shape[1] - self.visual
        everything = torch.where(self.valid[:, self.visual :], self.valid.shape[1], -1)
        share = received(query[:, :, -words:], everything, view)[0, : self.visual]
        self.attended.append(share)
        p = share / share.sum().clamp_min(1e-12)
        self.entropies.append(float(-torch.special.xlogy(p, p).sum()) / log(max(2, self.visual)))


@dataclass(frozen=True, slots=True)
class StillModel:
    """A `mmsdk.vla.policy.Model`: a flow model whose sight remembers, and forgets when an episode begins."""

    model: FlowModel
    sight: StillSight

    @staticmethod
    def of(model: FlowModel, reuse: Reuse = Reuse()) -> "StillModel":
        """The same flow model, remembering. Raises InputError for a sight that is of other parts than eyes and a decoder."""
        if not isinstance(model.sight, Eyes):
            raise InputError(f"{type(model.sight).__name__} does not read a frame as PaliGemma and SmolVLM do", item="VLA-Cache")
        sight = StillSight(model.sight, reuse)
        return StillModel(replace(model, sight=sight), sight)

    def reset(self, episode: int) -> None:
        """See `Model`."""
        self.sight.reset()
        self.model.reset(episode)

    def __call__(self, request: Request) -> ActionChunk:
        """See `Model`."""
        return self.model(request)


def alike(before: Float[Tensor, "n p"], now: Float[Tensor, "n p"]) -> Float[Tensor, " n"]:
    """The cosine of each patch to itself before; 1 where they are equal."""
    cosine: Tensor = F.cosine_similarity(before, now, dim=-1)
    return cosine.masked_fill((before == now).all(-1), 1.0)


def shares(entropies: list[float], growth: float) -> tuple[float, ...]:
    """Of the still tokens the share that each layer reuses: 1 - its entropy, from the sharpest layer to the flattest; see above."""
    low, high = min(entropies), max(entropies)
    found = list[float]()
    for entropy in entropies:
        share = 1 - (entropy - low) / (high - low) if high > low else 1.0
        before = found[-1] if found else share
        found.append(max(before, before + growth * (share - before)))
    return tuple(found)


def _patches(pixels: Float[Tensor, "1 c 3 h w"], visual: int) -> Float[Tensor, "n p"]:
    """The pixels of each visual token, in [0, 1]: those of its cell of a square grid."""
    cameras, side = pixels.shape[1], pixels.shape[-1]
    grid = isqrt(visual // cameras)
    if grid * grid * cameras != visual or side % grid or pixels.shape[-2] != side:
        raise InputError(f"{visual} tokens of {cameras} pictures of {side} x {side} are no square grid of cells", item="VLA-Cache")
    cells = (pixels[0] + 1).div(2).unflatten(3, (grid, -1)).unflatten(2, (grid, -1))
    patches: Tensor = cells.permute(0, 2, 4, 1, 3, 5).flatten(0, 2).flatten(1)
    return patches
