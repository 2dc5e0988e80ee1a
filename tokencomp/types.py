"""What a visual-token compressor is: fewer tokens, and an account of what became of each.

A method works at one of three stages, told by the protocol that it fulfils:

    encoder     `mmsdk.vision.shorten.Shortener`    merges tokens in every block of the vision transformer, by a plan
                `mmsdk.vision.prune.Pruner`         removes tokens there, of each picture as many as it finds right
    projector   `Compressor`                        takes visual tokens and gives fewer, on the side of the projector that it declares
    decoder     `Thinner`                           drops tokens between layers of the language model
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.tokencomp.budget import Budget
from mmsdk.vision.types import VisualTokens
from mmsdk.vision.values import brief

__all__ = ["Audit", "Between", "Compressed", "Compressor", "Positions", "Side", "Thinner"]

Positions = Literal["keep", "compact"]
"""What tokens that go on are counted by: their original positions, or 0, 1, 2, ... over what is left, which the answer continues."""

Side = Literal["before", "behind", "either"]
"""What features are read as: the encoder's, before the projector; the language model's embeddings, behind it; or not at all."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Where every source token went.

    `assignment[i]` is the index of the kept token that source token i was merged into, or -1 where i was dropped.
    `scores` are the method's importance of each source token (zeros where it has none). `seconds` is this input's equal share of the time
    in which all inputs of its shape, or of its batch, were selected from together; 0 where that cannot be told apart from the encoder's.
    """

    method: str
    assignment: Int[Tensor, " n"]
    scores: Float[Tensor, " n"]
    seconds: float = 0.0

    def __repr__(self) -> str:
        return brief(self)


@dataclass(frozen=True, slots=True)
class Compressed:
    """The surviving tokens of one input, in reading order, and the audit."""

    tokens: VisualTokens
    audit: Audit

    def __repr__(self) -> str:
        return brief(self)


@runtime_checkable
class Compressor(Protocol):
    """Pure, deterministic and batched: result i depends on input i alone and has exactly `budgets[i].count` tokens.

    `side` of the projector says what the features are; `asks`, which only a method behind it can, that the question matters. Then
    `query[i]` are the embeddings of the words that are asked about input i.
    """

    side: ClassVar[Side]
    asks: ClassVar[bool]

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[Float[Tensor, "_ d"]] | None = None
    ) -> list[Compressed]: ...


@runtime_checkable
class Between(Protocol):
    """What a decoder shows between two of its layers: a batch of rows, padded in front, s tokens each."""

    @property
    def hidden(self) -> Float[Tensor, "b s d"]:
        """The residual stream."""
        ...

    @property
    def visual(self) -> Bool[Tensor, "b s"]:
        """True where a visual token stands."""
        ...

    def attention(self, rows: Literal["last", "text"], layer: Literal["done", "next"]) -> Float[Tensor, "b s"]:
        """The attention that every token receives, mean over heads and over the asking `rows`: the last token, or all words.

        `layer` is the one just done or the next. Only these rows are computed, never a matrix of tokens by tokens.
        """
        ...


@runtime_checkable
class Thinner(Protocol):
    """Drops visual tokens between layers of the decoder: what is gone is neither computed nor cached from there on.

    Words are never dropped. Each visual input meets its budget by itself, exactly, after the last of the cuts. `positions` count, under
    "keep", also the tokens that did not enter: everything stands where it would if nothing had been dropped.
    """

    @property
    def positions(self) -> Positions: ...

    def enter(self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget]) -> list[Compressed]:
        """What goes into the decoder at all: everything, or those that the encoder alone can choose, as they are."""
        ...

    def layers(self, depth: int) -> tuple[int, ...]:
        """After how many of a decoder's `depth` layers tokens are dropped, ascending. Raises ModelError where it has too few."""
        ...

    def counts(self, entered: int, budget: Budget) -> tuple[int, ...]:
        """How many tokens of an input are left after each of the cuts."""
        ...

    def score(self, between: Between) -> Float[Tensor, "b s"]:
        """The importance of every token at a cut; of each visual input the highest stay, the earlier one of equals."""
        ...
