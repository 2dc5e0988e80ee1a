"""Dual memory at two frequencies: slow steps encode and remember, fast steps refine what the last slow one left.

Published (D2-VLA, arXiv 2609.34792). Every V control steps the VLM encodes a block behind what it reads of the slow queue, and the expert
acts on (what it reads of the earlier blocks, the new block). In between, every E steps, the newest slow block is refined with what the
cameras see now, and the expert acts on (what it reads of the fast queue, the refined block). Slow and fast histories are never put side
by side; a refinement always begins at the slow anchor; a slow step empties the fast queue; scores are each consumer's own. The paper runs
E = 25 steps of a chunk of 25 and V = 75, queues of 4 and 2 blocks, a read ratio of .7.

Reconstruction: the new block counts among what its readers observe; where delta would be above 1, because a VLM update did not come in
time, it is 1; a step that has time for neither acts on the last view again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, ModelError
from mmsdk.exclusive import Exclusive
from mmsdk.kv.parts import Part, whole
from mmsdk.kv.readers import BlockQueue
from mmsdk.kv.selection import BlockLayout, Selection
from mmsdk.kv.slots import positions_of
from mmsdk.stages import Context
from mmsdk.vla.memory.encode import encode, reading
from mmsdk.vla.memory.refine import Refiner
from mmsdk.vla.memory.scores import Tally

__all__ = ["Ablation", "Consumer", "DualMemory", "MemoryConfig", "Turn", "laid"]

Ablation = Literal["none", "slow", "fast", "dual"]
Consumer = Literal["prefill", "slow", "fast"]
"""Who reads by scores of its own: the VLM's prefill and the expert's slow denoising the slow queue, its fast denoising the fast one."""


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """`period` is V, the time from one VLM update to the next, in the unit of the times that the memory is told.

    `slow` and `fast` are the queues' capacities, the current block included: a slow queue of 1 remembers nothing. Without `refine` there is
    no fast path: between VLM updates the expert acts on the slow view again. `keep` is rho of the scores. Raises InputError for a period
    that is not above 0, queues below 1 and a rho outside [0, 1).
    """

    period: float = 75.0
    slow: int = 4
    fast: int = 2
    refine: bool = True
    selection: Selection = field(default_factory=Selection)
    keep: float = 0.2

    def __post_init__(self) -> None:
        if not self.period > 0 or min(self.slow, self.fast) < 1 or not 0 <= self.keep < 1:
            raise InputError(f"{self}: the period is above 0, queues hold at least 1, keep is in [0, 1)", item="memory")

    def ablated(self, condition: Ablation) -> "MemoryConfig":
        """With the slow history alone, the fast path alone, neither ("none") or both ("dual", which changes nothing)."""
        slow = self.slow if condition in ("slow", "dual") else 1
        return replace(self, slow=slow, refine=self.refine and condition in ("fast", "dual"))


@dataclass(frozen=True, slots=True)
class Turn:
    """What the expert acts on this time; `close` it when the flow is solved, so that the scores learn what was looked at."""

    context: Context
    consumer: Consumer
    parts: tuple[Part, ...]


class DualMemory:
    """The memory of one episode for a batch of rows that are observed together; any `Decoder` will do. Nothing in it carries gradients.

    A step that raises leaves it as it was. What belongs together, a step and what the expert then looks at, is put inside `acting`, and is
    then one thing to other threads.
    """

    def __init__(self, decoder: Decoder, refiner: Refiner, config: MemoryConfig = MemoryConfig()) -> None:
        """Raises ModelError where the refiner was made for another number of layers."""
        if len(refiner.editors) != decoder.config.layers:
            raise ModelError(f"the refiner edits {len(refiner.editors)} layers, the decoder has {decoder.config.layers}")
        self.decoder, self.refiner, self.config = decoder, refiner, config
        self.slow_queue, self.fast_queue = BlockQueue(config.slow), BlockQueue(config.fast)
        self._turns: tuple[Turn, ...] = ()
        self._alone = Exclusive("memory")
        self._selects = config.selection.budget(refiner.layout) < refiner.layout.visual

    @property
    def layout(self) -> BlockLayout:
        """What stands where in every block."""
        return self.refiner.layout

    @property
    def started(self) -> bool:
        """Whether there has been a slow step since the last reset."""
        return len(self.slow_queue) > 0

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks held."""
        return self.slow_queue.nbytes + self.fast_queue.nbytes

    def reset(self) -> None:
        """A new episode: nothing that was seen counts any more. Waits for another thread's `acting`."""
        with self._alone:
            self.slow_queue.clear()
            self.fast_queue.clear()
            self._turns = ()

    @contextmanager
    def acting(self) -> Iterator[None]:
        """One answer, from what is seen to what the expert looked at: it is remembered as a whole, or, where anything raises, not at all.

        One after another where there are several threads. Raises InputError where its own thread is still amid one.
        """
        with self._alone, self._unless_raised():
            yield

    @contextmanager
    def _unless_raised(self) -> Iterator[None]:
        """What is changed inside stays changed, unless it raises."""
        before = self.slow_queue.entries, self.fast_queue.entries, self._turns
        try:
            yield
        except BaseException:
            self.slow_queue.entries, self.fast_queue.entries, self._turns = before
            raise

    @torch.no_grad()
    def slow(
        self,
        time: float,
        sight: Float[Tensor, "b n d"],
        present: Bool[Tensor, "b c"],
        ids: Int[Tensor, "b w"],
        said: Bool[Tensor, "b w"],
    ) -> Turn:
        """A VLM update: encode what the cameras show, and the words `ids` where `said`, behind what is remembered.

        Raises InputError for another number of visual tokens than the layout's, and for more words than it has slots.
        """
        with self._unless_raised():
            return self._updated(time, *laid(self.decoder, self.layout, sight, present, ids, said))

    @torch.no_grad()
    def fast(self, time: float, sight: Float[Tensor, "b n d"], present: Bool[Tensor, "b c"]) -> Turn:
        """Between two VLM updates: refine the newest slow block by what the cameras show now. Without a fast path, see `again`.

        Raises InputError before the first slow step of an episode, and for another number of visual tokens than the layout's.
        """
        if not self.config.refine or not self.started:
            return self.again()
        _check_sight(self.layout, sight, present)
        with self._unless_raised():
            return self._refined(time, sight, present)

    def again(self) -> Turn:
        """The last view once more. Raises InputError where there is none."""
        if not self._turns:
            raise InputError("there is no block to act on; the first step of an episode is a slow one", item="memory")
        return self._turns[-1]

    def close(self, turn: Turn, tally: Tally) -> None:
        """Let the expert's scores learn from a solved flow that `tally` looked on at."""
        if self._selects:
            queue = self.slow_queue if turn.consumer == "slow" else self.fast_queue
            queue.observe(turn.consumer, turn.parts, tally.mean(), self.config.keep)

    def _updated(self, time: float, embeddings: Float[Tensor, "b s d"], valid: Bool[Tensor, "b s"]) -> Turn:
        """A block behind what is remembered, and what the expert reads of both."""
        selection, queue = self.config.selection, self.slow_queue
        queue.make_room()
        before = queue.parts("prefill", selection, self.layout)
        encoded = encode(self.decoder, embeddings, valid, before, time, observe=self._selects)
        taken = (*queue.parts("slow", selection, self.layout), whole(encoded.block))
        queue.push(encoded.block)
        if self._selects:
            queue.observe("prefill", (*before, whole(encoded.block)), encoded.received, self.config.keep)
        self.fast_queue.clear()
        last = positions_of(valid).argmax(1)
        hidden = encoded.hidden[torch.arange(len(last), device=last.device), last]
        # where nothing is selected the expert reads what the VLM did, and the block itself
        view = reading(self.decoder, taken) if self._selects else encoded.read
        return self._turn("slow", taken, Context(hidden, view))

    def _refined(self, time: float, sight: Float[Tensor, "b n d"], present: Bool[Tensor, "b c"]) -> Turn:
        """The newest slow block as it is by now, and what the expert reads of the fast history before it."""
        anchor, rows = self.slow_queue.entries[-1].block, len(sight)
        delta = min(max((time - anchor.time) / self.config.period, 0.0), 1.0)
        refined = self.refiner(anchor, sight, present, torch.full((rows,), delta, device=sight.device), time)
        self.fast_queue.make_room()
        taken = (*self.fast_queue.parts("fast", self.config.selection, self.layout), whole(refined))
        self.fast_queue.push(refined)
        return self._turn("fast", taken, Context(self._turns[-1].context.hidden, reading(self.decoder, taken)))

    def _turn(self, consumer: Consumer, taken: tuple[Part, ...], context: Context) -> Turn:
        turn = Turn(context, consumer, taken)
        self._turns = (turn,)
        return turn


def laid(
    decoder: Decoder,
    layout: BlockLayout,
    sight: Float[Tensor, "b n d"],
    present: Bool[Tensor, "b c"],
    ids: Int[Tensor, "b w"],
    said: Bool[Tensor, "b w"],
) -> tuple[Float[Tensor, "b s d"], Bool[Tensor, "b s"]]:
    """The embeddings of a block and which are valid: visual tokens in the decoder's width, then the words, padded to their slots.

    Raises InputError where they do not fit the layout.
    """
    _check_sight(layout, sight, present)
    spare = layout.words - ids.shape[1]
    if spare < 0:
        raise InputError(f"{ids.shape[1]} tokens, a block has {layout.words} slots for them; say it shorter", item="instruction")
    words = F.pad(decoder.embed(ids), (0, 0, 0, spare))
    valid = torch.cat((layout.shown(present), F.pad(said, (0, spare))), dim=1)
    return torch.cat((sight.to(words.dtype), words), dim=1), valid


def _check_sight(layout: BlockLayout, sight: Float[Tensor, "b n d"], present: Bool[Tensor, "b c"]) -> None:
    if sight.shape[1] != layout.visual or present.shape[1] != len(layout.cameras):
        found = f"{sight.shape[1]} visual tokens of {present.shape[1]} cameras"
        raise InputError(f"{found}, a block has {layout.visual} of {len(layout.cameras)}", item="sight")
