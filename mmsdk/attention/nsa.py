"""Native sparse attention (NSA, arXiv 2502.11089): three branches, added under gates.

    out = g_cmp attend(compressed blocks) + g_slc attend(chosen blocks of tokens) + g_win attend(the last tokens)

Tokens are compressed in blocks of 32 that begin every 16; the weights that a query gives to compressed blocks say which blocks of 64 tokens
it reads in full: 16 of them, among them the first and the last two. All query heads of a key-value head choose together, so that their
blocks are loaded once. [published] all of this; the importance of a block is equation 9, where a compressed block counts once for each unit
of 16 tokens that it shares. A learned map compresses (`mmsdk.decoder.nsa`), and the model is trained with it: nothing here prunes a model
that was not.

Rows are in order and without padding: token p stands in column p, and the s queries are the last of the t columns.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.kernels.ops.block_worth import block_worth

__all__ = ["Sparsity", "blocks_of", "choose", "coarse", "fine", "importance"]

# Numbers of chosen tokens that may be laid out at one time (16 MiB in float32).
_SLICE = 1 << 22


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Compressed blocks of `block` tokens every `stride`; `count` blocks of `selected` tokens, `initial` and `local` ones always; `window`.

    Raises ModelError where blocks are no multiples of the stride, or more are forced than chosen.
    """

    block: int = 32
    stride: int = 16
    selected: int = 64
    count: int = 16
    initial: int = 1
    local: int = 2
    window: int = 512

    def __post_init__(self) -> None:
        if min(self.block, self.stride, self.selected, self.count, self.window) < 1 or min(self.initial, self.local) < 0:
            raise ModelError(f"NSA: sizes must be above 0: {self}")
        if self.block % self.stride or self.selected % self.stride:
            raise ModelError(f"NSA: blocks of {self.block} and {self.selected} tokens are no multiples of the stride {self.stride}")
        if self.initial + self.local > self.count:
            raise ModelError(f"NSA: {self.initial} initial and {self.local} local blocks are more than the {self.count} that are chosen")


def blocks_of(x: Float[Tensor, "b g t d"], sizes: Sparsity) -> Float[Tensor, "b g c m d"]:
    """The blocks that are compressed, those that are complete: block i is tokens i * stride to i * stride + block - 1. A view."""
    if x.shape[2] < sizes.block:
        return x.new_zeros(*x.shape[:2], 0, sizes.block, x.shape[3])
    return x.unfold(2, sizes.block, sizes.stride).transpose(3, 4)


def coarse(
    query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g c d"], values: Float[Tensor, "b g c d"], tokens: int, sizes: Sparsity
) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s c"]]:
    """Attention to compressed blocks, and its weights; `tokens` is t. A query sees the blocks that end at its own position or before.

    One that sees none gives 0.
    """
    b, h, s, _ = query.shape
    ends = torch.arange(keys.shape[2], device=query.device) * sizes.stride + sizes.block - 1
    unseen = ends > _places(s, tokens, query)[:, None]
    scores = block_worth(query, keys, None, keys.new_zeros(keys.shape[:3]), query.shape[-1] ** -0.5, together=False).flatten(1, 2)
    # no row of -inf alone, whose gradient would be no number
    alive = ~unseen.all(-1, keepdim=True)
    weights = scores.masked_fill(unseen & alive, -torch.inf).softmax(-1) * alive
    # the heads that share a key-value head stand below one another
    mixed = weights.to(values.dtype).unflatten(1, (keys.shape[1], -1)).flatten(2, 3) @ values
    return mixed.view(b, h, s, values.shape[3]), weights


def importance(weights: Float[Tensor, "b h s c"], groups: int, tokens: int, sizes: Sparsity) -> Float[Tensor, "b g s n"]:
    """What the blocks of selected tokens are worth to a key-value head's queries together: equation 9, summed over the heads."""
    summed = weights.unflatten(1, (groups, -1)).sum(2)
    count, each = -(-tokens // sizes.selected), sizes.selected // sizes.stride
    units = summed.new_zeros(*summed.shape[:3], max(count * each, summed.shape[3] + sizes.block // sizes.stride - 1))
    for later in range(sizes.block // sizes.stride):
        units[..., later : later + summed.shape[3]] += summed
    worth: Tensor = units[..., : count * each].unflatten(-1, (count, each)).sum(-1)
    return worth


def choose(worth: Float[Tensor, "b g s n"], tokens: int, sizes: Sparsity) -> Int[Tensor, "b g s k"]:
    """The blocks that each query reads, -1 where there are fewer: the first, its own and the one before, and the ones worth most."""
    blocks, own = torch.arange(worth.shape[3], device=worth.device), _places(worth.shape[2], tokens, worth)[:, None] // sizes.selected
    forced = (blocks < sizes.initial) | (blocks > own - sizes.local)
    rank = worth.float().masked_fill(forced, torch.inf).masked_fill(blocks > own, -torch.inf)
    best = rank.topk(min(sizes.count, worth.shape[3]), dim=-1)
    return best.indices.masked_fill(best.values == -torch.inf, -1)


def fine(
    query: Float[Tensor, "b h s d"],
    keys: Float[Tensor, "b g t d"],
    values: Float[Tensor, "b g t d"],
    index: Int[Tensor, "b g s k"],
    sizes: Sparsity,
) -> Float[Tensor, "b h s d"]:
    """Attention to the tokens of the chosen blocks, up to the query's own."""
    step = max(1, _SLICE // (query.shape[0] * keys.shape[1] * index.shape[3] * sizes.selected * keys.shape[3]))
    places = _places(query.shape[2], keys.shape[2], query)
    parts = zip(query.split(step, 2), index.split(step, 2), places.split(step), strict=True)
    return torch.cat([_over_blocks(*part, keys, values, sizes.selected) for part in parts], dim=2)


def _over_blocks(
    query: Float[Tensor, "b h s d"],
    index: Int[Tensor, "b g s k"],
    places: Int[Tensor, " s"],
    keys: Float[Tensor, "b g t d"],
    values: Float[Tensor, "b g t d"],
    size: int,
) -> Float[Tensor, "b h s d"]:
    b, g, t, d = keys.shape
    columns = (index[..., None] * size + torch.arange(size, device=index.device)).flatten(3)
    unseen = (index < 0).repeat_interleave(size, dim=3) | (columns > places[:, None])
    rows, heads = (torch.arange(count, device=index.device) for count in (b, g))
    at = rows[:, None, None, None], heads[:, None, None], columns.clamp(0, t - 1)
    shared = query.unflatten(1, (g, -1)).transpose(2, 3) * d**-0.5
    scores = (shared @ keys[at].transpose(3, 4)).float().masked_fill(unseen[:, :, :, None], -torch.inf)
    mixed: Tensor = scores.softmax(-1).to(values.dtype) @ values[at]
    return mixed.transpose(2, 3).flatten(1, 2)


def _places(queries: int, tokens: int, like: Tensor) -> Int[Tensor, " s"]:
    """The columns of the queries, which are the last tokens."""
    return torch.arange(tokens - queries, tokens, device=like.device)
