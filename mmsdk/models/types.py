"""What a vision-language model family is made of, as the pipeline sees it."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from mmsdk.axes import LINE, Axes
from mmsdk.decoder.transformer import Decoder
from mmsdk.encoded import Encoded
from mmsdk.prompt import Layout, Prompt
from mmsdk.template import Piece, Template, Turn
from mmsdk.vision.types import Media, VisionEncoder, VisualTokens
from mmsdk.vision.values import brief

__all__ = ["VLM", "Assembled", "Codec", "Connected", "Connector", "Stands", "Tokenizer"]

Connector = Callable[[Sequence[VisualTokens]], list[Float[Tensor, "_ d"]]]
"""Visual tokens of several inputs to embeddings."""

Stands = Callable[[int, Media | Encoded], Sequence[Piece]]
"""What stands in a prompt for a visual input, by its number and by what it is."""


@runtime_checkable
class Codec(Protocol):
    """Text to ids and back. Special tokens typed by a user are ordinary text; families place real ones by their id."""

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; nothing is added, and nothing in it is read as a special token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        ...


@runtime_checkable
class Tokenizer(Codec, Hashable, Protocol):
    """A codec that can say its vocabulary."""

    def spelled(self, id_: int) -> bytes:
        """The bytes that a token adds to a text; of a special token none."""
        ...

    def to_json(self) -> str:
        """The vocabulary and its rules, in the format of `tokenizer.json`."""
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


@runtime_checkable
class Connected(VLM, Protocol):
    """A model whose projector can be had by itself, as those from checkpoints have it."""

    @property
    def connector(self) -> Connector:
        """What `connect` projects with."""
        ...


@dataclass(frozen=True, slots=True)
class Assembled:
    """A `VLM` from a checkpoint: its parts, its own chat template, and what `stands` in that template's place for a picture or a clip.

    `axes` are those that the decoder's heads turn along.
    """

    name: str
    encoder: VisionEncoder
    connector: Connector
    decoder: Decoder
    template: Template
    stands: Stands
    stop_ids: frozenset[int]
    axes: Axes = LINE

    def __repr__(self) -> str:
        return brief(self)

    @property
    def tokenizer(self) -> Tokenizer:
        """Words to ids and back."""
        return self.template.tokenizer

    @property
    def context(self) -> int:
        """The longest sequence that the decoder was made for."""
        return self.decoder.config.context

    def connect(self, tokens: Sequence[VisualTokens]) -> list[Float[Tensor, "_ d"]]:
        """See `VLM`."""
        return self.connector(tokens)

    def layout(self, prompt: Prompt) -> Layout:
        """The prompt's turns before the next answer; see `talk`."""
        return self.talk(prompt.turns)

    def talk(self, turns: Sequence[Turn]) -> Layout:
        """A conversation before the next answer; media are counted over all of it."""
        media = [segment for turn in turns for segment in turn.segments if isinstance(segment, Media | Encoded)]
        return replace(self.template.layout(turns, lambda number: self.stands(number, media[number])), axes=self.axes)
