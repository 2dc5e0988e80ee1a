"""The actor while it is trained: it draws what to do instead of taking the most probable, and says how probable that was.

A row's decision is whether (Bernoulli), how many (categorical over fractions) and which: tokens are drawn without replacement, each in
proportion to the exponential of its removal logit among those left (Plackett-Luce), by adding Gumbel noise once and taking the largest.
Its log-probability is the sum of the three, of which how many and which count only where the row prunes.

Letters: b rows, g rows that prune, s tokens of all rows together, m tokens of the longest row.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.tokencomp.actor import Actor, Brief, removals
from mmsdk.vision.prune import View

__all__ = ["SURE", "Drawing", "Odds", "draw", "odds", "plackett_luce"]

_NEVER = -1e9
SURE = 0.97
"""No gate is surer than this while it is trained: one that is never tried again would never learn that it should not have closed."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """What was decided for a batch of rows, and all that is needed to ask again how probable it is.

    `order` is of each pruning row its tokens in the order drawn, the first `remove` of which went.
    """

    brief: Brief
    gate: Bool[Tensor, " b"]
    choice: Int[Tensor, " b"]
    remove: Int[Tensor, " b"]
    order: Int[Tensor, "g m"]


@dataclass(frozen=True, slots=True)
class Odds:
    """The log-probability of a row's decision, and the entropy of whether and how many (of which it is left out)."""

    logp: Float[Tensor, " b"]
    entropy: Float[Tensor, " b"]


@torch.no_grad()
def draw(actor: Actor, view: View, least: int, generator: torch.Generator) -> tuple[Bool[Tensor, " s"], Drawing]:
    """What stays, and the decision."""
    brief, rows = Brief.of(view), view.rows
    gate_logit, count_logits, context = actor(brief)
    gate = torch.rand(len(gate_logit), generator=generator) < _opens(gate_logit)
    choice = torch.multinomial(count_logits.softmax(dim=1), 1, generator=generator)[:, 0]
    patches = torch.tensor(rows.lengths) - rows.first
    remove = removals(choice, patches, least).masked_fill(~gate, 0)
    stays = torch.ones(len(view.stream), dtype=torch.bool)
    if not bool(gate.any()):
        return stays, Drawing(brief, gate, choice, remove, torch.zeros(0, 0, dtype=torch.int64))
    asked = brief.only(gate)
    noise = -(-torch.rand(len(asked.states), generator=generator).clamp(1e-9, 1 - 1e-7).log()).log()
    order = _padded(noise - actor.which(asked, context[gate]), asked).argsort(dim=1, descending=True, stable=True)
    gone = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, torch.arange(order.shape[1]) < remove[gate, None])
    place = torch.arange(len(asked.states)) - asked.rows.starts[asked.rows.row]
    stays[gate[rows.row]] = ~gone[asked.rows.row, place]
    return stays, Drawing(brief, gate, choice, remove, order)


def odds(actor: Actor, drawing: Drawing) -> Odds:
    """How probable a decision is to the actor as it is now."""
    gate_logit, count_logits, context = actor(drawing.brief)
    gate, log_count = drawing.gate, count_logits.log_softmax(dim=1)
    p = _opens(gate_logit)
    logp = torch.where(gate, p, 1 - p).log()
    logp = logp + gate * log_count.gather(1, drawing.choice[:, None])[:, 0]
    entropy = F.binary_cross_entropy(p, p, reduction="none") - p * (log_count.exp() * log_count).sum(dim=1)
    if len(drawing.order):
        asked = drawing.brief.only(gate)
        logits = _padded(-actor.which(asked, context[gate]), asked).gather(1, drawing.order)
        which = torch.zeros_like(logp).masked_scatter(gate, plackett_luce(logits, drawing.remove[gate]))
        logp = logp + which
    return Odds(logp, entropy)


def _opens(gate_logit: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    return (1 - SURE) + (2 * SURE - 1) * gate_logit.sigmoid()


def plackett_luce(logits: Float[Tensor, "g m"], drawn: Int[Tensor, " g"]) -> Float[Tensor, " g"]:
    """The log-probability of having drawn the first `drawn` of each row, in this order, without replacement.

    Each draw is in proportion to exp(logit) among what is left, which is everything behind it in the row.
    """
    left = logits.flip(1).logcumsumexp(dim=1).flip(1)
    first = torch.arange(logits.shape[1], device=logits.device) < drawn[:, None]
    return ((logits - left) * first).sum(dim=1)


def _padded(logits: Float[Tensor, " s"], brief: Brief) -> Float[Tensor, "g m"]:
    """Logits of patch tokens by row; class tokens and what stands behind a shorter row are never drawn."""
    patch = brief.rows.padded(brief.rows.patch.float()) > 0
    return brief.rows.padded(logits).masked_fill(~patch, _NEVER)
