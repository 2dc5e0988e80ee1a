"""What a vision-language model family is made of, as the pipeline sees it."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from mmsdk.decoder.transformer import Decoder
from mmsdk.prompt import Layout, Prompt
from mmsdk.vision.types import VisionEncoder, VisualTokens

__all__ = ["VLM", "Tokenizer"]


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back. Special tokens typed by a user are ordinary text; families place real ones by their id."""

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; nothing is added, and nothing in it is read as a special token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        ...


@runtime_checkable
class VLM(Protocol):
    """The parts of one model and how they fit together. One implementation per family, in a file of `mmsdk.models`."""

    @property
    def name(self) -> str:
        """What the user asked for: "mini", a folder, or "org/name"."""
        ...

    @property
    def encoder(self) -> VisionEncoder:
        """Pixels to visual tokens."""
        ...

    @property
    def decoder(self) -> Decoder:
        """The language model, which takes embeddings."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Words to ids and back."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer and are no part of it."""
        ...

    @property
    def context(self) -> int:
        """The longest sequence, prompt and answer together, in tokens."""
        ...

    def connect(self, tokens: Sequence[VisualTokens]) -> list[Float[Tensor, "_ d"]]:
        """Visual tokens, as many as compression left of each input, as embeddings [n d] of the decoder's width d."""
        ...

    def layout(self, prompt: Prompt) -> Layout:
        """Where words, separators and visual inputs stand; real special tokens are put here, by id."""
        ...
