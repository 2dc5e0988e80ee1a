"""Streaming navigation with a bounded memory: a frame is remembered by fewer of its tokens the older it gets.

Published: StreamVLN keeps a history of 8 frames of 196 tokens; EdgeVLN (arXiv 2609.35570, abstract) prunes memory tokens when it builds
the streaming context anew.

Reconstruction, all of how: a frame that has been seen keeps the k tokens that its instruction attended to most, or those that are newest,
1 - the largest cosine to a token kept of the frame before it (to the mean of its own, where it is the first); k falls with age, in a
geometric progression, to a least number; what is left is read at positions without gaps; a frame that is too old is dropped. Words are
read with the current frame alone. What goes is freed at once.

Letters: b rows, s slots of a block, n visual tokens, k kept, d width.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import BudgetError
from mmsdk.kv.parts import Block, Part, whole
from mmsdk.kv.selection import BlockLayout
from mmsdk.kv.slots import positions_of
from mmsdk.stages import Context
from mmsdk.tokencomp.ranking import top
from mmsdk.vla.memory.dual import laid
from mmsdk.vla.memory.encode import encode

__all__ = ["Fading", "FrameMemory", "novelty"]

By = Literal["attention", "novelty"]


@dataclass(frozen=True, slots=True)
class Fading:
    """Of the newest remembered frame `newest` tokens are kept, of each older one `fade` times as many, but `least`; of `frames` frames.

    Raises BudgetError for counts below 1, and a share outside (0, 1].
    """

    frames: int = 8
    newest: int = 98
    fade: float = 0.7
    least: int = 8
    by: By = "novelty"

    def __post_init__(self) -> None:
        if min(self.frames, self.newest, self.least) < 1 or not 0 < self.fade <= 1 or self.by not in get_args(By):
            raise BudgetError(f"{self}: counts are at least 1, fade is in (0, 1], by is {' or '.join(get_args(By))}", item="fading")

    def kept(self, age: int, tokens: int) -> int:
        """k of a frame of so many tokens that `age` others have followed."""
        # a count that is whole but for rounding is that count
        return min(tokens, max(self.least, ceil(round(self.newest * self.fade**age, 6))))

    def most(self, tokens: int) -> int:
        """Tokens that are remembered at most, where a frame has so many."""
        return sum(self.kept(age, tokens) for age in range(self.frames))


@dataclass(frozen=True, slots=True)
class _Frame:
    """What is left of a frame, how much each token is worth, and what it looked like."""

    block: Block
    worth: Float[Tensor, "b k"]
    looks: Float[Tensor, "b k d"]

    def thinned(self, count: int) -> "_Frame":
        """The so many best, in order; the memory of the others is freed."""
        if count >= self.worth.shape[1]:
            return self
        index = top(self.worth, count)
        across = index[None, :, None, :, None].expand(*self.block.keys.shape[:3], -1, self.block.keys.shape[4])
        keys, values = self.block.keys.gather(3, across), self.block.values.gather(3, across)
        left = Block(keys, values, self.block.valid.gather(1, index), self.block.time)
        return _Frame(left, self.worth.gather(1, index), self.looks.gather(1, index[:, :, None].expand(-1, -1, self.looks.shape[2])))


class FrameMemory:
    """The memory of one episode for a batch of rows; any `Decoder` will do. A frame that is refused leaves it as it was."""

    def __init__(self, decoder: Decoder, layout: BlockLayout, fading: Fading = Fading()) -> None:
        self.decoder, self.layout, self.fading = decoder, layout, fading
        self._frames: tuple[_Frame, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """How many are held of each frame, from the oldest to the newest."""
        return tuple(frame.worth.shape[1] for frame in self._frames)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held."""
        return sum(frame.block.nbytes for frame in self._frames)

    def reset(self) -> None:
        """A new episode: nothing that was seen counts any more."""
        self._frames = ()

    def parts(self) -> tuple[Part, ...]:
        """What a frame is read behind, from the oldest to the newest."""
        return tuple(whole(frame.block) for frame in self._frames)

    @torch.no_grad()
    def see(
        self,
        sight: Float[Tensor, "b n d"],
        present: Bool[Tensor, "b c"],
        ids: Int[Tensor, "b w"],
        said: Bool[Tensor, "b w"],
        time: float = 0.0,
    ) -> Context:
        """Read a frame, and the words `ids` where `said`, behind what is remembered: what an action is chosen from, and remember it.

        Raises InputError for another number of visual tokens than the layout's, and for more words than it has slots.
        """
        visual, attending = self.layout.visual, self.fading.by == "attention"
        embeddings, valid = laid(self.decoder, self.layout, sight, present, ids, said)
        words = torch.arange(valid.shape[1], device=valid.device)[None] >= visual
        encoded = encode(self.decoder, embeddings, valid, self.parts(), time, attending, words)
        # the cosine of two tokens is the product of these
        looks = F.normalize(sight.float(), dim=-1)
        worth = (
            encoded.received[..., -valid.shape[1] :].mean(0)[:, :visual]
            if attending
            else novelty(looks, valid[:, :visual], *self._before())
        )
        block = Block(encoded.block.keys[..., :visual, :], encoded.block.values[..., :visual, :], valid[:, :visual], time)
        self._remember(_Frame(block, worth.masked_fill(~valid[:, :visual], -1.0), looks))
        last = positions_of(valid).argmax(1)
        return Context(encoded.hidden[torch.arange(len(last), device=last.device), last], encoded.read)

    def _before(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """What the frame before looked like, and which of that is real."""
        return tuple((frame.looks, frame.block.valid) for frame in self._frames[-1:])

    def _remember(self, frame: _Frame) -> None:
        frames = (*self._frames, frame)[-self.fading.frames :]
        self._frames = tuple(
            each.thinned(self.fading.kept(age, self.layout.visual))
            for age, each in zip(range(len(frames) - 1, -1, -1), frames, strict=True)
        )


def novelty(
    looks: Float[Tensor, "b n d"], valid: Bool[Tensor, "b n"], *before: tuple[Float[Tensor, "b k d"], Bool[Tensor, "b k"]]
) -> Float[Tensor, "b n"]:
    """1 - the largest cosine of each token to those of the frame before it, all of length 1; to the mean of its own without one."""
    if not before:
        middle = F.normalize((looks * valid[:, :, None]).sum(1, keepdim=True), dim=-1)
        return 1 - (looks @ middle.transpose(1, 2))[..., 0]
    kept, real = before[0]
    return 1 - (looks @ kept.transpose(1, 2)).masked_fill(~real[:, None], -1.0).amax(-1)
