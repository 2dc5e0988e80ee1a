"""How a dual memory is trained: one slow anchor with its history, and the fast branches that follow it.

Published (D2-VLA, arXiv 2609.34792): two fast branches; the flow loss alone, as a mean over valid steps; keys and values of the slow path
are not detached, fresh visual tokens are; nothing is compressed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError
from mmsdk.kv.parts import Block, Part, whole
from mmsdk.stages import Context
from mmsdk.vla.heads.flow import flow_loss
from mmsdk.vla.memory.dual import MemoryConfig, laid
from mmsdk.vla.memory.encode import encode, encode_blocks, reading
from mmsdk.vla.memory.expert import DualExpert
from mmsdk.vla.memory.refine import Refiner

__all__ = ["Branches", "branch_loss", "prefixes", "together"]


@dataclass(frozen=True, slots=True)
class Branches:
    """What a training step sees, k blocks of history (the last is the anchor) and f fast branches.

    `sight` holds the visual tokens of the blocks and then of the branches, `present` their cameras. A block that a row does not have, for
    its episode is younger, has no `known`. `state` and `actions` are those of the anchor and then of the branches, `steps` the actions that
    count, `deltas` the branches' times in VLM periods since the anchor.
    """

    sight: Float[Tensor, "b m n d"]
    present: Bool[Tensor, "b m c"]
    known: Bool[Tensor, "b k"]
    ids: Int[Tensor, "b w"]
    said: Bool[Tensor, "b w"]
    state: Float[Tensor, "b e p"]
    actions: Float[Tensor, "b e h a"]
    steps: Bool[Tensor, "b e h"]
    deltas: tuple[float, ...]

    def __post_init__(self) -> None:
        moments, blocks, fast = self.sight.shape[1], self.known.shape[1], len(self.deltas)
        if not blocks or moments != blocks + fast or self.state.shape[1] != fast + 1:
            told = f"{moments} moments and {self.state.shape[1]} targets of {blocks} blocks and {fast} branches"
            raise InputError(f"{told}; expected {max(1, blocks) + fast} and {fast + 1}", item="branches")


def prefixes(decoder: Decoder, refiner: Refiner, config: MemoryConfig, seen: Branches) -> list[Context]:
    """What the expert acts on at the anchor and at every branch, with gradients; the read ratio is not looked at."""
    blocks, anchors = list[Part](), list[Context]()
    for number in range(seen.known.shape[1]):
        known, history = seen.known[:, number, None], blocks[max(0, len(blocks) - config.slow + 1) :]
        embeddings, valid = laid(decoder, refiner.layout, seen.sight[:, number], seen.present[:, number], seen.ids, seen.said)
        encoded = encode(decoder, embeddings, valid & known, history)
        blocks, anchors = [*history, whole(encoded.block)], [Context(encoded.hidden[:, -1], encoded.read)]
    turns, fast, anchor, last = anchors, list[Part](), blocks[-1].block, anchors[0].hidden
    for number, delta in enumerate(seen.deltas, start=seen.known.shape[1]):
        if config.refine:
            since = torch.full((len(last),), delta, device=last.device)
            refined = whole(refiner(anchor, seen.sight[:, number], seen.present[:, number], since))
            fast = [*fast[max(0, len(fast) - config.fast + 1) :], refined]
        turns.append(Context(last, reading(decoder, fast)) if config.refine else turns[0])
    return turns


def together(decoder: Decoder, refiner: Refiner, config: MemoryConfig, seen: Branches) -> Context:
    """The same contexts below one another, the anchor's rows first, made in one pass of the decoder and one of the refiner.

    Of small models it is the number of passes that takes time. Shorter contexts are padded; `hidden` is not what a decoder gave.
    """
    (rows, blocks), fast = seen.known.shape, len(seen.deltas)
    flat = (part[:, :blocks].flatten(0, 1) for part in (seen.sight, seen.present))
    words = (part.repeat_interleave(blocks, dim=0) for part in (seen.ids, seen.said))
    embeddings, valid = (part.unflatten(0, (rows, blocks)) for part in laid(decoder, refiner.layout, *flat, *words))
    cache = encode_blocks(decoder, embeddings, valid & seen.known[:, :, None], config.slow - 1)
    slots = refiner.layout.slots
    turns = [cache.block(slots * min(config.slow, blocks))] * (1 + fast)
    if config.refine and fast:
        sight, present = (part[:, blocks:].transpose(0, 1).flatten(0, 1) for part in (seen.sight, seen.present))
        since = torch.tensor(seen.deltas, device=sight.device).repeat_interleave(rows)
        edited = _apart(refiner(_below([cache.block(slots)] * fast), sight, present, since), fast)
        turns = [turns[0], *(_beside(edited[max(0, end - config.fast) : end]) for end in range(1, fast + 1))]
    longest = max(turn.valid.shape[1] for turn in turns)
    block = _below([_padded(turn, longest) for turn in turns])
    return Context(block.keys.new_zeros(len(block.valid), 0), reading(decoder, [whole(block)]))


def _below(blocks: Sequence[Block]) -> Block:
    """All rows of blocks of as many slots."""
    keys, values = torch.cat([block.keys for block in blocks], dim=1), torch.cat([block.values for block in blocks], dim=1)
    return Block(keys, values, torch.cat([block.valid for block in blocks]), blocks[-1].time)


def _beside(blocks: Sequence[Block]) -> Block:
    """All slots of blocks of the same rows."""
    keys, values = torch.cat([block.keys for block in blocks], dim=3), torch.cat([block.values for block in blocks], dim=3)
    return Block(keys, values, torch.cat([block.valid for block in blocks], dim=1), blocks[-1].time)


def _apart(block: Block, count: int) -> list[Block]:
    """What `_below` put below one another."""
    parts = zip(block.keys.chunk(count, dim=1), block.values.chunk(count, dim=1), block.valid.chunk(count), strict=True)
    return [Block(keys, values, valid, block.time) for keys, values, valid in parts]


def _padded(block: Block, slots: int) -> Block:
    """With slots that hold nothing in front, so many in all."""
    spare = slots - block.valid.shape[1]
    keys, values = (F.pad(x, (0, 0, spare, 0)) for x in (block.keys, block.values))
    return Block(keys, values, F.pad(block.valid, (spare, 0)), block.time)


def branch_loss(
    decoder: Decoder,
    refiner: Refiner,
    expert: DualExpert,
    config: MemoryConfig,
    seen: Branches,
    noise: Float[Tensor, "b e h a"],
    times: Float[Tensor, "b e"],
) -> Float[Tensor, ""]:
    """The flow loss over the valid steps of the anchor and of all branches; `times` are theirs, 1 being noise."""
    state, actions, start, time, steps = (x.transpose(0, 1).flatten(0, 1) for x in (seen.state, seen.actions, noise, times, seen.steps))
    velocity = expert.velocity(together(decoder, refiner, config, seen), state)
    return flow_loss(velocity, actions, start, time[:, None], steps)
