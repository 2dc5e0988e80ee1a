"""How a dual memory is trained: one slow anchor with its history, and the fast branches that follow it.

Published (D2-VLA, arXiv 2609.34792): two fast branches; the flow loss alone, as a mean over valid steps; keys and values of the slow path
are not detached, fresh visual tokens are; nothing is compressed.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError
from mmsdk.kv.parts import Part, whole
from mmsdk.stages import Context
from mmsdk.vla.heads.flow import flow_loss
from mmsdk.vla.memory.dual import MemoryConfig, laid
from mmsdk.vla.memory.encode import encode, reading
from mmsdk.vla.memory.expert import DualExpert
from mmsdk.vla.memory.refine import Refiner

__all__ = ["Branches", "branch_loss", "prefixes"]


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
    contexts = prefixes(decoder, refiner, config, seen)
    losses = [
        flow_loss(expert.velocity(context, seen.state[:, e]), seen.actions[:, e], noise[:, e], times[:, e, None], seen.steps[:, e])
        for e, context in enumerate(contexts)
    ]
    weights = seen.steps.sum((0, 2)).to(losses[0].dtype)
    return (torch.stack(losses) * weights).sum() / weights.sum().clamp_min(1)
