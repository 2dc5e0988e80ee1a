"""HiLS: hierarchical attention by landmarks (arXiv 2607.02980): a window, and the chunks of 64 tokens that are worth most to a query.

A chunk is known by its landmark, a key k' and a bias b': its landmark query mu attends to the chunk's keys,

    p = softmax(scale mu.K),    k' = sum_j p_j K_j,    b' = H(p) = - sum_j p_j ln p_j

and scale q.k' + b' is then the first-order expansion of log sum_j exp(scale q.K_j) around mu, exact at q = mu and for equal keys. A query
may choose among the chunks c < (i - window + 1) // chunk, those that end before its window. Per key-value head it takes the `topk` of the
largest log-probability among all those chunks and the window, the most that any of the group's heads gives. The chosen ones and the window
are mixed by

    w = softmax([scores of the chosen, lse of the window]),    out = sum_c w_c attend(in c) + w_win attend(window)

[published] all of this, with chunk 64, topk 32, window 512. The source's remark that a chunk's last token is masked is read as: mu belongs
to that token and it stays among the keys, since H is said to reach ln 64.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.kernels.ops.block_worth import block_worth

__all__ = ["Hierarchy", "chosen", "landmarks", "mixed", "worth"]

# Numbers of chosen tokens that may be laid out at one time (16 MiB in float32).
_SLICE = 1 << 22


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Chunks of `chunk` tokens, of which a query reads `topk`, and its `window`. Raises ModelError for sizes below one."""

    chunk: int = 64
    topk: int = 32
    window: int = 512

    def __post_init__(self) -> None:
        if min(self.chunk, self.topk, self.window) < 1:
            raise ModelError(f"HiLS: sizes must be above 0: {self}")


def landmarks(
    queries: Float[Tensor, "b g c d"], keys: Float[Tensor, "b g c m d"]
) -> tuple[Float[Tensor, "b g c d"], Float[Tensor, "b g c"]]:
    """Key k' and bias b' of every chunk, in float32, from its landmark query and its keys."""
    scores = (keys.float() @ queries.float()[..., None])[..., 0] * keys.shape[-1] ** -0.5
    logs = scores.log_softmax(-1)
    shares = logs.exp()
    return (shares[..., None] * keys.float()).sum(-2), -(shares * logs).sum(-1)


def worth(
    query: Float[Tensor, "b h s d"],
    keys: Float[Tensor, "b g c d"],
    bias: Float[Tensor, "b g c"],
    places: Int[Tensor, " s"],
    sizes: Hierarchy,
) -> Float[Tensor, "b g r s c"]:
    """scale q.k' + b' for the r query heads of each key-value head, -inf where a chunk is not behind the window of the query's place."""
    scores = block_worth(query, keys, None, bias, query.shape[-1] ** -0.5, together=False)
    eligible = torch.arange(keys.shape[2], device=keys.device) < (places[:, None] - sizes.window + 1) // sizes.chunk
    return scores.masked_fill(~eligible, -torch.inf)


def chosen(scores: Float[Tensor, "b g r s c"], near: Float[Tensor, "b g r s"], topk: int) -> Int[Tensor, "b g s k"]:
    """The chunks that the heads of a group read together, -1 where there are fewer; `near` is the log-sum-exp of the window."""
    whole = torch.cat((scores, near[..., None]), dim=-1).logsumexp(-1, keepdim=True)
    best = (scores - whole).amax(2).topk(min(topk, scores.shape[-1]), dim=-1)
    return best.indices.masked_fill(best.values == -torch.inf, -1)


def mixed(
    query: Float[Tensor, "b h s d"],
    keys: Float[Tensor, "b g c m d"],
    values: Float[Tensor, "b g c m d"],
    scores: Float[Tensor, "b g r s c"],
    index: Int[Tensor, "b g s k"],
    near: tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s"]],
) -> Float[Tensor, "b h s d"]:
    """Attention within each chosen chunk, and the window's output, under the weights of their scores."""
    g = keys.shape[1]
    step = max(1, _SLICE // max(1, query.shape[0] * g * index.shape[3] * keys.shape[3] * keys.shape[4]))
    heads, outs = query.unflatten(1, (g, -1)), []
    window, lse = near[0].unflatten(1, (g, -1)), near[1].unflatten(1, (g, -1))
    for start in range(0, query.shape[2], step):
        part = slice(start, start + step)
        picked = index[:, :, part]
        own = scores[:, :, :, part].gather(4, picked.clamp_min(0)[:, :, None].expand(-1, -1, heads.shape[2], -1, -1))
        own = own.masked_fill(picked[:, :, None] < 0, -torch.inf)
        shares = torch.cat((own, lse[:, :, :, part, None]), dim=-1).softmax(-1).to(query.dtype)
        inside = _inside(heads[:, :, :, part], keys, values, picked)
        outs.append((shares[..., :-1, None] * inside).sum(-2) + shares[..., -1:] * window[:, :, :, part])
    return torch.cat(outs, dim=3).flatten(1, 2)


def _inside(
    query: Float[Tensor, "b g r s d"], keys: Float[Tensor, "b g c m d"], values: Float[Tensor, "b g c m d"], index: Int[Tensor, "b g s k"]
) -> Float[Tensor, "b g r s k d"]:
    """What each query takes from each of its chunks by itself."""
    rows, heads = (torch.arange(count, device=index.device) for count in keys.shape[:2])
    at = rows[:, None, None, None], heads[:, None, None], index.clamp_min(0)
    scores = torch.einsum("bgrsd,bgskmd->bgrskm", query * query.shape[-1] ** -0.5, keys[at]).float()
    return torch.einsum("bgrskm,bgskmd->bgrskd", scores.softmax(-1).to(values.dtype), values[at])
