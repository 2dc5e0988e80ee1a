"""From scores to what stays: budgets resolved, and exactly as many entries as they say, of every row and head.

Letters: b rows, t entries held, k entries kept, q is 1 where all heads hold or keep the same, else the key-value heads.
"""

import re

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk import plugins
from mmsdk.errors import BudgetError
from mmsdk.tokencomp.ranking import TIE, top_within
from mmsdk.tokencomp.share import nearest

__all__ = ["all_but_one", "amount_of", "checked", "chosen", "kept", "latest_first", "relative"]


def amount_of(text: str, asked: str) -> int | float:
    """A count ("512") or a share ("0.25") as a user writes it in `asked`. Raises BudgetError for anything else."""
    try:
        amount = plugins.number(int if re.fullmatch(r"[+-]?[0-9]+", text) else float, text)
    except ValueError:
        raise BudgetError(f"{asked!r}: the amount {text!r} is no number; write a count such as 512 or a share such as 0.25") from None
    return checked(amount)


def checked(amount: int | float) -> int | float:
    """The same. Raises BudgetError for a count below 1, and a share outside (0, 1]."""
    if isinstance(amount, int) and amount < 1:
        raise BudgetError(f"a memory must keep at least one token, got {amount}")
    if isinstance(amount, float) and not 0 < amount <= 1:
        raise BudgetError(f"the share {amount} of a prompt is outside (0, 1]; write a whole number for a count of tokens")
    return amount


def kept(amount: int | float, held: int) -> int:
    """How many of a prompt's `held` tokens stay: a count as it is, of a share at least 1, halves rounded up."""
    return amount if isinstance(amount, int) else max(1, nearest(amount, held))


def chosen(
    scores: Float[Tensor, "b q t"] | Int[Tensor, "b q t"], valid: Bool[Tensor, "b #q t"], quota: Int[Tensor, "b #q"], most: int
) -> Int[Tensor, "b q k"]:
    """The columns that stay, ascending and padded in front by -1 to k = `most`, the largest quota of any row and head.

    Of equal scores the earlier stay. Fractions are compared relative to the largest of their row, so that noise in their last bits
    decides nothing: those that differ by a millionth of it are equal. An infinite score is above (or below) every other one.
    """
    q, t = max(scores.shape[1], valid.shape[1]), scores.shape[2]
    score, real = scores.expand(-1, q, -1).flatten(0, 1), valid.expand(-1, q, -1).flatten(0, 1)
    wanted = quota.expand(-1, q).flatten()[:, None]
    columns = torch.arange(t, device=score.device)
    if score.is_floating_point():
        stays = top_within(relative(score.float(), real), real.long(), torch.cat((torch.zeros_like(wanted), wanted), dim=1))
    else:
        order = score.masked_fill(~real, torch.iinfo(score.dtype).min).argsort(dim=1, descending=True, stable=True)
        stays = real & (torch.empty_like(order).scatter_(1, order, columns.expand_as(order)) < wanted)
    index = columns.expand_as(stays).masked_fill(~stays, -1).sort(dim=1).values[:, t - most :]
    return index.reshape(-1, q, most)


def all_but_one(scores: Float[Tensor, "b q t"] | Int[Tensor, "b q t"]) -> Int[Tensor, "b q k"]:
    """The same where there is no padding and one entry of every row and head goes: k = t - 1. What every token asks for comes cheaper."""
    score, close = (relative(scores.float(), scores.isfinite()), TIE) if scores.is_floating_point() else (scores, 0)
    least, last = score.topk(2, dim=-1, largest=False).values.split(1, dim=-1)
    # of those that equal the last one chosen, the latest goes
    goes = score <= torch.where(least < last - close, least, last + close)
    columns = torch.arange(score.shape[-1], device=score.device)
    gone = torch.where(goes, columns, -1).amax(-1, keepdim=True)
    return columns[:-1] + (columns[:-1] >= gone)


def latest_first(scores: Float[Tensor, "b q t"], order: Int[Tensor, "b #q t"], latest: Int[Tensor, "b #q t"]) -> Float[Tensor, "b q t"]:
    """The scores, brought below 1, with the `latest` entries (above 0 where they count) before all others, the newest of them first."""
    most = scores.masked_fill(order < 0, 0).abs().amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
    newer = order.to(scores.dtype) / order.shape[2]
    return torch.where(latest > 0, 1 + newer, scores / most * (1 - torch.finfo(scores.dtype).eps))


def relative(scores: Float[Tensor, "*n t"], real: Bool[Tensor, "*n t"]) -> Float[Tensor, "*n t"]:
    """As shares of the largest of what is real and finite, so that a tie is a tie however large the scores are; in [-2, 2]."""
    most = scores.masked_fill(~(real & scores.isfinite()), 0).abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
    return (scores / most).clamp(-2, 2)
