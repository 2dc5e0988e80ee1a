"""What a policy of the memory is: methods that say what the decoder remembers of what it has read, without training.

A policy is one file of `mmsdk.kv.policies`, a frozen dataclass whose fields are its knobs. It is one of three:

    Evictor    gives every entry a score; the memory keeps the best, exactly as many as the budget says
    Reader     evicts nothing, and decides what a query reads of all that is there
    Storer     brings a store of its own for each layer: other precisions, levels, arenas

An evictor may also be an `Observer`, which is shown the queries of every pass, a `Mover`, which re-positions what stays, `Early`, one
that leaves no gaps (`Gapless`), and one that latents will do for (`OfLatents`).

Letters: b rows, h heads, g key-value heads, s new tokens, t entries held, d width; q is 1 where all heads of a layer hold the same
tokens, else g; n is b, or b * g where every key-value head is a row of its own.
"""

from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kv.entries import Arriving, Entries
from mmsdk.kv.turning import Turning
from mmsdk.kv.types import LayerView

__all__ = [
    "Amount",
    "Ask",
    "Closing",
    "Early",
    "Evictor",
    "Gapless",
    "Hearing",
    "InStep",
    "KVPolicy",
    "LayerStore",
    "Mover",
    "Observer",
    "OfLatents",
    "Reader",
    "Storer",
]

Amount = int | float
"""How much stays: a count of tokens (int), or a share of the prompt's (float in (0, 1])."""


@runtime_checkable
class Ask(Protocol):
    """What the decoder lends the memory of a layer while its new tokens ask."""

    @property
    def positions(self) -> Int[Tensor, "b s"]:
        """Those of the queries, counted in tokens; -1 for padding."""
        ...

    @property
    def places(self) -> Int[Tensor, "b s"]:
        """Where heads were turned to: the same, or along several axes the place on the first."""
        ...

    @property
    def window(self) -> int:
        """How many last positions a query of this layer sees, where the model says so; 0 for all."""
        ...

    @property
    def turning(self) -> Turning:
        """How keys of this layer turn."""
        ...

    def attend(self, query: Float[Tensor, "n h s d"], view: LayerView) -> Float[Tensor, "n h s e"]:
        """Exact attention to what a view holds, masked by positions. The view has a row for each of the batch, or for each of its heads."""
        ...

    def unturned(self, query: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h s d"]:
        """The queries before their rotation."""
        ...

    def row(self, place: int) -> "Ask":
        """The same of one row of the batch, which looks at a view of its own."""
        ...


@runtime_checkable
class Evictor(Protocol):
    """Scores entries; those of the largest scores stay, of equal ones the earlier. Whole numbers are compared exactly."""

    @property
    def interval(self) -> int:
        """While an answer is written, a layer is brought back to its budget when it holds so many tokens more; 0: the prompt alone."""
        ...

    @property
    def dense(self) -> int:
        """The first so many layers keep everything."""
        ...

    def scores(self, entries: Entries, keep: Int[Tensor, " b"]) -> Float[Tensor, "b q t"] | Int[Tensor, "b q t"]:
        """The worth of every entry where each row may keep so many; what padding gets does not matter."""
        ...


@runtime_checkable
class Observer(Protocol):
    """Is shown the queries of every pass, after their keys were stored and before anything is evicted."""

    def observe(self, entries: Entries, query: Float[Tensor, "b h s d"], ask: Ask) -> None:
        """Note what the policy will want to know, in `entries.columns` (one for each entry) or `entries.notes` (one for each row)."""
        ...


@runtime_checkable
class Mover(Protocol):
    """Re-positions entries after an eviction."""

    def move(self, entries: Entries) -> None:
        """Change `entries.keys` and `entries.positions` in place: they are the memory's own."""
        ...

    def close_up(self, entries: Entries, ahead: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """See `Closing`: move all that is held by one shift, so that positions of what went are given again.

        A fork may look at the same memory, so that here it is replaced (`Entries.place`).
        """
        ...


@runtime_checkable
class Early(Protocol):
    """Lets go before a single new token attends, which then sees no more than the budget, itself among it: for windows."""

    @property
    def early(self) -> bool:
        """True; it is there to be seen."""
        ...


@runtime_checkable
class Gapless(Protocol):
    """Holds the last tokens, and first ones that it moves right in front of them: nothing is missing between what is held.

    What is held may then move by one shift on all axes that heads turn along.
    """

    @property
    def gapless(self) -> bool:
        """True; it is there to be seen."""
        ...


@runtime_checkable
class OfLatents(Protocol):
    """Judges entries by their age and by the attention that they get, and by nothing else: what is held may be latents (DeepSeek's models).

    The queries that it is shown are then absorbed, such that their products with latents are the scores of the model.
    """

    @property
    def latents(self) -> bool:
        """True; it is there to be seen."""
        ...


@runtime_checkable
class Reader(Protocol):
    """Decides what a query reads. Prompts are attended to exactly; it is asked for a single new token of each row."""

    @property
    def dense(self) -> int:
        """The first so many layers read everything."""
        ...

    def read(self, query: Float[Tensor, "b h 1 d"], entries: Entries, ask: Ask, keep: Int[Tensor, " b"]) -> Float[Tensor, "b h 1 d"]:
        """What the query gets from about `keep` tokens of each row. `entries.read` is to be the pairs of key and value that were read."""
        ...


@runtime_checkable
class InStep(Protocol):
    """A storer whose stores treat all rows of a batch as the longest: once prompts were read, each row goes on in a store of its own."""

    @property
    def in_step(self) -> bool:
        """True; it is there to be seen."""
        ...


@runtime_checkable
class LayerStore(Protocol):
    """All that a cache holds of one layer."""

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated for it, with everything that a policy notes."""
        ...

    @property
    def span(self) -> int:
        """Slots for a key and a value that are allocated, over rows and key-value heads."""
        ...

    @property
    def read_bytes(self) -> int:
        """Bytes of keys and values that the last pass read."""
        ...

    @property
    def lengths(self) -> Int[Tensor, "b q"]:
        """Tokens held of each row, by each head where they differ."""
        ...

    def append(self, new: Arriving, keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s e"]) -> None:
        """Store new tokens, whose keys are turned to their positions."""
        ...

    def attend(self, query: Float[Tensor, "b h s d"], ask: Ask) -> Float[Tensor, "b h s e"]:
        """What the new tokens, already stored, get; whatever is due to go may go then."""
        ...

    def settle(self) -> None:
        """A prompt has been read: budgets are resolved, and what is above them goes. The next time they only hold."""
        ...

    def view(self) -> LayerView:
        """Everything it holds, as keys and values; heads that hold different tokens have the latest position among them."""
        ...

    def keep(self, index: Int[Tensor, "b k"]) -> None:
        """Keep only these entries of its view, ascending."""
        ...

    def select(self, rows: Int[Tensor, " r"]) -> "LayerStore":
        """A copy of these rows."""
        ...

    def fork(self) -> "LayerStore":
        """Another one with the same entries; neither sees what the other does from now on."""
        ...


@runtime_checkable
class Hearing(Protocol):
    """A store that wants to know what is a word and what is seen."""

    def hear(self, kinds: Int[Tensor, "b s"]) -> None:
        """The kinds of the tokens that come next: 0 a word, else the number of the picture or clip, counted from 1."""
        ...


@runtime_checkable
class Closing(Protocol):
    """A store in whose place for positions an endless stream never runs out."""

    def close_up(self, ahead: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """Move what is held to the positions 0, 1, 2, ..., with nothing between where something went.

        `ahead` is by how much the next word stands ahead of its position on the axes that heads turn along, 0 where there is one; returned
        is the same from now on.
        """
        ...


@runtime_checkable
class Storer(Protocol):
    """Brings a store of its own for each layer."""

    @property
    def bounds(self) -> bool:
        """Whether layers are held to their budget while an answer is written too, so that a stream may go on without end."""
        ...

    def store(self, layer: int, depth: int, amount: Amount) -> LayerStore:
        """An empty one for this layer of `depth`. What it is to keep is resolved by `mmsdk.kv.scoring.kept` at `LayerStore.settle`."""
        ...


KVPolicy = Evictor | Reader | Storer
