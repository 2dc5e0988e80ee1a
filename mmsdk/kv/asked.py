"""What policies note of the queries that ask: the last of them, and the attention that entries get.

Letters: b rows, h heads, g key-value heads, s new tokens, t entries, w queries, d width.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.kv.entries import Entries
from mmsdk.kv.policy import Ask
from mmsdk.kv.received import received
from mmsdk.kv.shelf import by_heads

__all__ = ["last_queries", "mass", "received_by_head"]


def last_queries(entries: Entries, query: Float[Tensor, "b h s d"], ask: Ask, count: int) -> None:
    """Note the last `count` queries, turned, and their positions, in `entries.notes`: "queries" [b w h d] and "asked" [b w]."""
    new = query.transpose(1, 2)[:, -count:].detach(), ask.positions[:, -count:]
    for name, x in zip(("queries", "asked"), new, strict=True):
        before = entries.notes.get(name, x[:, :0])
        gone = max(0, before.shape[1] + x.shape[1] - count)
        # a copy, so that nothing of the whole pass is held
        entries.notes[name] = torch.cat((before[:, gone:], x), dim=1)


def mass(entries: Entries) -> Float[Tensor, "b g t"]:
    """The attention that entries get from the queries that were noted: mean over these and over the heads of a group."""
    return received_by_head(entries, entries.notes["queries"].transpose(1, 2), entries.notes["asked"])


def received_by_head(
    entries: Entries, query: Float[Tensor, "b h w d"], positions: Int[Tensor, "b w"], newest: bool = False
) -> Float[Tensor, "b g t"]:
    """The same of any queries, at positions that are -1 for padding; `newest` as in `mmsdk.kv.received`."""
    g = entries.keys.shape[1]
    asking = by_heads(query, g), positions.repeat_interleave(g, dim=0)
    return received(*asking, entries.heads(), newest).reshape(len(query), g, -1)
