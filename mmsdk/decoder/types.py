"""What a decoder is to whoever lets it speak."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kv.types import KVCache

__all__ = ["Speaker"]


@runtime_checkable
class Speaker(Protocol):
    """Token ids in, scores of the next token out, with a cache in between: the decoders of Llama's kind, and those built otherwise."""

    def embed(self, ids: Int[Tensor, "b s"]) -> Float[Tensor, "b s d"]:
        """Token ids to what enters the decoder."""
        ...

    def __call__(self, x: Float[Tensor, "b s d"], positions: Int[Tensor, "b s"], cache: KVCache) -> Float[Tensor, "b s w"]:
        """Hidden states of new tokens at their positions, -1 for padding; the cache then holds them too."""
        ...

    def logits(self, hidden: Float[Tensor, "*n w"]) -> Float[Tensor, "*n v"]:
        """Scores of the next token, in float32."""
        ...

    def among(self, rows: Sequence[int]) -> "Speaker":
        """What speaks for these rows of the batch, by their places in it: itself, unless it treats rows each in their own way."""
        ...
