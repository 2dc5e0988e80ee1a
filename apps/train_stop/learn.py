"""How the walker and its verifier learn.

The walker learns on its own ways (DAgger: Ross et al., arXiv 1011.0686): now it goes as it thinks, now as the guide says, now anywhere, and
learns what the guide would have done. Then it is left alone. The verifier learns from the hidden states of walks in which STOP is never
carried out, so that it sees what lies before and behind the place to stop; its thresholds are set on walks that it has not learnt from.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.apps.train_stop.walker import Walker
from mmsdk.vla.envs.rooms import LIMIT, Walkers, draw, guide
from mmsdk.vla.heads.latte import STOP, StopVerifier, stop_loss
from mmsdk.vla.stop import Recorded, StopRule, tuned

__all__ = ["Walks", "rule_of", "teach", "verify", "walked"]

_GUIDED, _LOST = 0.4, 0.1
_AGAIN = 0.5
_MOST = 0.5


def teach(walker: Walker, steps: int, rows: int = 192, seed: int = 0) -> Iterator[float]:
    """Train the walker in place, telling the loss of each step."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(walker.parameters(), lr=2e-3, weight_decay=1e-4)
    walkers, ages = Walkers(draw(rows, generator)), torch.randint(LIMIT, (rows,), generator=generator)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 50, 1.02 - step / steps)
        right = guide(walkers)
        _, logits = walker(walkers.look(), walkers.rooms.goal)
        loss = F.cross_entropy(logits, right)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        _go_on(walkers, walker.proposes(logits.detach())[1], right, ages, generator)
        yield float(loss.detach())


def _go_on(
    walkers: Walkers, other: Int[Tensor, " n"], right: Int[Tensor, " n"], ages: Int[Tensor, " n"], generator: torch.Generator
) -> None:
    """One step of each walk; those that have arrived, some of them only a little later, begin anew elsewhere."""
    n = len(right)
    luck, anywhere = torch.rand(n, generator=generator), torch.randint(1, 4, (n,), generator=generator)
    taken = torch.where((luck < _GUIDED) & (right != STOP), right, other)
    walkers.apply(torch.where(luck > 1 - _LOST, anywhere, taken))
    ages += 1
    anew = (ages >= LIMIT) | ((right == STOP) & (torch.rand(n, generator=generator) < _AGAIN))
    walkers.renew(anew, draw(n, generator))
    ages[anew] = 0


@dataclass(frozen=True, slots=True)
class Walks:
    """What the backbone knew and proposed at every step of walks that nothing ended, and where STOP would have been right."""

    hidden: Float[Tensor, "n t d"]
    proposed: Int[Tensor, "n t"]
    near: Bool[Tensor, "n t"]


@torch.no_grad()
def walked(walker: Walker, count: int, seed: int) -> Walks:
    """So many walks; where the walker proposes STOP it goes on with its best other step, and now and then it errs."""
    generator = torch.Generator().manual_seed(seed)
    walkers, kept = Walkers(draw(count, generator)), list[tuple[Tensor, Tensor, Tensor]]()
    for _ in range(LIMIT):
        hidden, logits = walker(walkers.look(), walkers.rooms.goal)
        proposed, other = walker.proposes(logits)
        kept.append((hidden, proposed, walkers.near))
        lost = torch.rand(count, generator=generator) < _LOST / 2
        walkers.apply(torch.where(lost, torch.randint(1, 4, (count,), generator=generator), other))
    hidden, proposed, near = (torch.stack(part, dim=1) for part in zip(*kept, strict=True))
    return Walks(hidden, proposed, near)


def verify(verifier: StopVerifier, walks: Walks, steps: int, rows: int = 48, seed: int = 0) -> Iterator[float]:
    """Train the verifier in place, telling the loss of each step."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(verifier.parameters(), lr=2e-3, weight_decay=1e-3)
    weight = float((~walks.near).sum() / walks.near.sum().clamp_min(1))
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 30, 1.02 - step / steps)
        drawn = torch.randint(len(walks.near), (rows,), generator=generator)
        opinion, _ = verifier(walks.hidden[drawn], walks.proposed[drawn])
        loss = stop_loss(opinion, walks.near[drawn], torch.ones_like(walks.near[drawn]), min(weight, 4.0))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        yield float(loss.detach())


@torch.no_grad()
def rule_of(verifier: StopVerifier, walks: Walks) -> StopRule:
    """The rule that ends most of the walks where it is right, of those that end no more of them wrongly than the backbone alone does."""
    opinion, _ = verifier(walks.hidden, walks.proposed)
    seen = Recorded(opinion.probability, opinion.first, walks.proposed, walks.near)
    alone = seen.report(StopRule(accept=0.0, force=2.0, limit=LIMIT))
    return tuned(StopRule(limit=LIMIT), seen, min(alone.false_stop, _MOST))
