"""Prompts, and a step of those who speak, through the layers side by side, where that brings the weights from memory once for all of them.

    spoken, hidden = beside(decoder, [Says(ids, speaking), Reads(laid, cache)])

A prompt is bound by its products and a step by reading weights, so that one in the company of the other costs little more than alone. What
comes out is to the bit what each gives by itself (`mmsdk.kernels.cpu.prompt.read_beside`). Where C++ does not take all of them (other
dtypes, other caches, adapters, windows) they go one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.decoder.native import NativeRun, Pass
from mmsdk.decoder.prefill import Laid, prefill_into
from mmsdk.decoder.steps import next_hidden
from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.types import KVCache

__all__ = ["Reads", "Says", "beside"]


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """A part of a prompt, into its own cache."""

    laid: Laid
    cache: KVCache

    @property
    def plain(self) -> bool:
        """Whether it is nothing but embeddings at their positions, and several."""
        return len(self.laid.embeddings) > 1 and not (self.laid.deep or self.laid.turns or self.laid.mass)

    def alone(self, decoder: Decoder) -> Float[Tensor, "1 d"]:
        """Hidden states of the last token."""
        return prefill_into(decoder, [self.laid], (), self.cache, last=1).hidden[:, -1]

    def told(self, decoder: Decoder) -> tuple[Float[Tensor, "1 s d"], Int[Tensor, "1 s"]]:
        """The stream in front of the layers, and its positions."""
        return self.laid.embeddings[None], self.laid.positions[None]


@dataclass(frozen=True, slots=True, eq=False)
class Says:
    """A step: the token that each row of a cache said last."""

    ids: Int[Tensor, "b 1"]
    cache: KVCache
    plain: bool = True

    def alone(self, decoder: Decoder) -> Float[Tensor, "b d"]:
        """Hidden states of these tokens."""
        return next_hidden(decoder, self.ids[:, 0], self.cache)

    def told(self, decoder: Decoder) -> tuple[Float[Tensor, "b 1 d"], Int[Tensor, "b 1"]]:
        """See `Reads`."""
        return decoder.embed(self.ids), self.cache.position[:, None]


def beside(decoder: Decoder, parts: Sequence[Reads | Says]) -> list[Float[Tensor, "_ d"]]:
    """Hidden states, final norm applied, of the last token of each part, of which one at most is a step; the caches then hold all of them.

    To be called without gradients.
    """
    config, layers = decoder.config, range(decoder.config.layers)
    here = decoder.norm.weight.device.type == "cpu"
    alike = here and config.sees == "before" and not config.rope_sections.counts and not config.local.layers
    if len(parts) < 2 or not alike or not isinstance(decoder.express, NativeRun) or not all(_fits(decoder, part) for part in parts):
        return [part.alone(decoder) for part in parts]
    told, passes = [part.told(decoder) for part in parts], list[Pass]()
    for part, (x, positions) in zip(parts, told, strict=True):
        part.cache.advance(positions, layers)
        passes.append(Pass(x, decoder.rotation(positions, x.dtype), part.cache, 1))
    found: Sequence[Tensor] = decoder.express.beside(passes, layers)
    if not found:
        pairs = zip(passes, told, strict=True)
        found = [decoder.advanced(x, positions, one.cache, layers, last=1)[0] for one, (x, positions) in pairs]
    return [decoder.norm(x)[:, -1] for x in found]


def _fits(decoder: Decoder, part: Reads | Says) -> bool:
    """Whether all layers hold the same tokens, which are nothing special: a policy wants to be told what kind each of them is."""
    return part.plain and not isinstance(part.cache, PolicyCache) and len(decoder.runs(part.cache)) == 1
