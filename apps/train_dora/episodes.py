"""One episode a picture: the transformer runs, the actor decides before each eligible block, and every decision gets its own credit.

Finite horizon: a step is an eligible block, whose state is the stream as earlier deletions left it. After step j the prefix a_1..a_j has
been chosen; its shadow is the transformer continued from there with no further pruning, to a final prediction p_j. Its fidelity is
F_j = -KL(p_dense || p_j), F_0 = 0, and the credit of step j is F_j - F_{j-1}: summed over the steps that is F of the whole episode.

A step that removes nothing has its predecessor's prediction. So a shadow is needed only where another deletion follows, and it is split
off just before that: until then the episode itself is the shadow. Shadows are further rows of the same packed pass.

Letters: b pictures, j steps, k steps and the state before them, c names.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mmsdk.apps.train_dora.pictures import Probe, divergence
from mmsdk.apps.train_dora.policy import Drawing, draw
from mmsdk.apps.train_dora.pool import Pool
from mmsdk.tokencomp.actor import Actor
from mmsdk.vision.packed import Rows, received
from mmsdk.vision.prune import View, flops
from mmsdk.vision.vit import Block, ViT, ViTConfig

__all__ = ["Decide", "Episodes", "block_flops", "play", "sampled"]

Decide = Callable[[View], tuple[Bool[Tensor, " s"], Drawing]]


@dataclass(frozen=True, slots=True)
class Episodes:
    """What happened: the decisions of each step, operations saved by it as a share of the dense transformer's blocks, the fidelity after it
    (behind a column of zeros for the dense prediction), the prediction that was there before it, and the last one."""

    drawings: tuple[Drawing, ...]
    saved: Float[Tensor, "b j"]
    fidelity: Float[Tensor, "b k"]
    before: Float[Tensor, "b j c"]
    final: Float[Tensor, "b c"]

    @property
    def credit(self) -> Float[Tensor, "b j"]:
        """F_j - F_{j-1}."""
        return self.fidelity.diff(dim=1)


def sampled(actor: Actor, least: int, generator: torch.Generator) -> Decide:
    """The actor drawing its decisions."""
    return lambda view: draw(actor, view, least, generator)


def block_flops(config: ViTConfig, tokens: int) -> int:
    """Operations of one block over so many tokens."""
    return flops(tokens, config.width, config.hidden, gated=config.activation == "swiglu")


@torch.no_grad()
def play(vit: ViT, probe: Probe, blocks: tuple[int, ...], decide: Decide, pool: Pool) -> Episodes:
    """Run an episode of each picture of a pool that was cut in front of the first of `blocks`."""
    (b, full, _), first, dense = pool.stream.shape, vit.cls.shape[0], pool.dense
    x, rows, looks = pool.stream.flatten(0, 1), Rows.of(b, full, first, pool.stream.device), pool.received.flatten()
    shadow, shadows = x[:0], Rows((), rows.token[:0], full, first)
    last, owners = torch.full((b,), -1), list[tuple[int, int]]()
    drawings, lengths = list[Drawing](), [torch.tensor(rows.lengths)]
    for i, block in enumerate(vit.blocks):
        if i < blocks[0]:
            continue
        assert isinstance(block, Block)
        if i in blocks:
            stays, drawing = decide(View(i, len(vit.blocks), x, looks, rows))
            splits = (drawing.remove > 0) & (last >= 0)
            copies, copied = rows.chosen(splits)
            shadow, shadows = torch.cat((shadow, x[copies])), joined(shadows, copied)
            owners += [(row, int(last[row])) for row in splits.nonzero()[:, 0].tolist()]
            index, rows = rows.narrowed(stays)
            x, last = x[index], torch.where(drawing.remove > 0, len(drawings), last)
            drawings.append(drawing)
            lengths.append(torch.tensor(rows.lengths))
        together, query, key = block.attend_rows(torch.cat((x, shadow)), joined(rows, shadows))
        if i + 1 in blocks:
            looks = received(query[: len(x)], key[: len(x)], rows)
        x, shadow = block.feed(together).split([len(x), len(shadow)])
    every = joined(rows, shadows)
    states = every.padded(vit.norm(torch.cat((x, shadow))))[:, first:]
    logits = probe(states, torch.arange(states.shape[1]) < torch.tensor(every.lengths)[:, None] - first)
    after = _after(logits, owners, last, dense, len(blocks))
    fidelity = torch.stack([-divergence(dense, after[:, j]) for j in range(len(blocks) + 1)], dim=1)
    fidelity[:, 0] = 0.0
    return Episodes(tuple(drawings), _saved(vit.config, blocks, lengths, full), fidelity, after[:, :-1], logits[:b])


def joined(one: Rows, other: Rows) -> Rows:
    """The rows of both, those of the second behind those of the first."""
    token = torch.cat((one.token, other.token + len(one.lengths) * one.full))
    return Rows((*one.lengths, *other.lengths), token, one.full, one.first)


def _after(logits: Tensor, owners: list[tuple[int, int]], last: Tensor, dense: Tensor, steps: int) -> Float[Tensor, "b k c"]:
    """The prediction after 0, 1, 2, ... steps: dense until the first deletion, then that of the shadow or, at last, of the episode."""
    b = len(dense)
    after = dense[:, None].repeat(1, steps + 1, 1)
    for shadow, (row, step) in enumerate(owners):
        after[row, step + 1 :] = logits[b + shadow]
    for row, step in enumerate(last.tolist()):
        if step >= 0:
            after[row, step + 1 :] = logits[row]
    return after


def _saved(config: ViTConfig, blocks: tuple[int, ...], lengths: list[Tensor], full: int) -> Float[Tensor, "b j"]:
    """What a step saves in the blocks from its own to the last, by the tokens before and after it."""
    dense = config.layers * block_flops(config, full)
    price = torch.tensor([block_flops(config, n) for n in range(full + 1)], dtype=torch.float64)
    steps = [(config.layers - i) * (price[n] - price[m]) / dense for i, n, m in zip(blocks, lengths, lengths[1:], strict=False)]
    return torch.stack(steps, dim=1).float()
