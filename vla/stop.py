"""When a verified STOP counts: thresholds, patience and a limit, calibrated so that few stops are false.

Reconstruction (EdgeVLN, arXiv 2609.35570, publishes none of it): a proposed STOP is accepted where the verifier ranks it first and
p >= `accept`, otherwise the best other action is taken; another action becomes STOP where p >= `force` for `patience` steps running; an
episode ends at `limit` steps in any case. With `accept` 0 every proposed STOP is accepted, with `force` above 1 none is made: that is the
backbone's own policy. An answer in which no action can be read is no STOP: it is for the caller to propose what goes on.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vla.heads.latte import STOP, StopVerifier, Trace

__all__ = ["StopReport", "StopRule", "Terminator", "calibrated", "reported"]


@dataclass(frozen=True, slots=True)
class StopRule:
    """See above. Raises InputError for thresholds below 0, or patience or a limit below 1."""

    accept: float = 0.5
    force: float = 0.9
    patience: int = 2
    limit: int = 500

    def __post_init__(self) -> None:
        if min(self.accept, self.force) < 0 or min(self.patience, self.limit) < 1:
            raise InputError(f"{self}: thresholds are at least 0, patience and limit at least 1", item="stop rule")

    def accepts(self, probability: Float[Tensor, "*b"], first: Bool[Tensor, "*b"]) -> Bool[Tensor, "*b"]:
        """Whether a proposed STOP is taken."""
        return (first & (probability >= self.accept)) | torch.full_like(first, self.accept == 0)


@dataclass(slots=True)
class Terminator:
    """A verifier at work in episodes of one batch that run side by side."""

    verifier: StopVerifier
    rule: StopRule
    _trace: Trace = field(default_factory=Trace, init=False)
    _sure: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long), init=False)

    def reset(self) -> None:
        """New episodes."""
        self._trace, self._sure = Trace(), torch.zeros(0, dtype=torch.long)

    @torch.no_grad()
    def __call__(self, hidden: Float[Tensor, "b d"], proposed: Int[Tensor, " b"], other: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """The action of this step, where the backbone proposes one and `other` is its best that is not STOP."""
        opinion, self._trace = self.verifier(hidden[:, None], proposed[:, None], self._trace)
        probability, first = opinion.probability[:, 0], opinion.first[:, 0]
        before = self._sure.to(hidden.device) if len(self._sure) else torch.zeros_like(proposed)
        self._sure = torch.where(probability >= self.rule.force, before + 1, 0)
        wants = proposed == STOP
        stops = torch.where(wants, self.rule.accepts(probability, first), self._sure >= self.rule.patience)
        stops = stops | (self._trace.count >= self.rule.limit)
        return torch.where(stops, STOP, torch.where(wants, other, proposed))


@dataclass(frozen=True, slots=True)
class StopReport:
    """The share of the steps where STOP is wrong at which it is taken, and of those where it is right at which it is not."""

    false_stop: float
    missed_stop: float
    n: int


def reported(rule: StopRule, probability: Float[Tensor, " n"], first: Bool[Tensor, " n"], near: Bool[Tensor, " n"]) -> StopReport:
    """What the rule does with STOPs that are proposed at these n steps, `near` telling where they are right."""
    taken = rule.accepts(probability, first)
    false, missed = (taken & ~near).sum() / (~near).sum().clamp_min(1), (~taken & near).sum() / near.sum().clamp_min(1)
    return StopReport(float(false), float(missed), len(near))


def calibrated(
    rule: StopRule, probability: Float[Tensor, " n"], first: Bool[Tensor, " n"], near: Bool[Tensor, " n"], most: float
) -> StopRule:
    """The rule with the lowest `accept` above 0 whose share of false stops on held-out steps is at most `most`.

    Raises InputError where `most` is outside [0, 1) or no step is given.
    """
    if not 0 <= most < 1 or not len(near):
        raise InputError(f"{most} of {len(near)} steps; the share is in [0, 1) and there is at least one step", item="calibration")
    wrong = torch.sort(probability[first & ~near], descending=True).values
    allowed = int(most * int((~near).sum()))
    # just above the first wrong one too many
    accept = float(torch.nextafter(wrong[allowed], wrong.new_tensor(2.0))) if len(wrong) > allowed else torch.finfo(torch.float32).tiny
    return StopRule(accept, rule.force, rule.patience, rule.limit)
