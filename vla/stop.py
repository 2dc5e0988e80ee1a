"""When a verified STOP counts: thresholds, patience and a limit, calibrated so that few stops are false.

Reconstruction (EdgeVLN, arXiv 2609.35570, publishes none of it): a proposed STOP is accepted where the verifier ranks it first and
p >= `accept`, otherwise the best other action is taken; another action becomes STOP where p >= `force` for `patience` steps running; an
episode ends at `limit` steps in any case. With `accept` 0 every proposed STOP is accepted, with `force` above 1 none is made: that is the
backbone's own policy. An answer in which no action can be read is no STOP: it is for the caller to propose what goes on.

Actions may be those of an arm as well, STOP being "done".
"""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.errors import InputError
from mmsdk.vla.heads.latte import STOP, StopVerifier, Trace

__all__ = ["Recorded", "StopReport", "StopRule", "Terminator", "calibrated", "reported", "tuned"]


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


@dataclass(frozen=True, slots=True)
class Recorded:
    """Whole episodes that no STOP has ended: what the verifier said, what the backbone proposed, and where STOP would have been right.

    Where the backbone proposed STOP, its best other action was taken: as a rule does that rejects it.
    """

    probability: Float[Tensor, "n t"]
    first: Bool[Tensor, "n t"]
    proposed: Int[Tensor, "n t"]
    near: Bool[Tensor, "n t"]

    def ends(self, rule: StopRule) -> Int[Tensor, " n"]:
        """The step at which the rule would have ended each of them; t where it would not. Its limit is not looked at."""
        steps = torch.arange(self.near.shape[1], device=self.near.device)
        sure = self.probability >= rule.force
        # how many sure steps running there are: those since the last that was not
        running = steps - torch.where(sure, -1, steps).cummax(dim=1).values
        wants = self.proposed == STOP
        taken = torch.where(wants, rule.accepts(self.probability, self.first), running >= rule.patience)
        return torch.where(taken, steps, len(steps)).amin(dim=1)

    def report(self, rule: StopRule) -> StopReport:
        """The shares of the episodes that the rule ends where STOP is wrong, and that it does not end although STOP was right somewhere."""
        ends = self.ends(rule)
        right = F.pad(self.near, (0, 1)).gather(1, ends[:, None])[:, 0]
        false, missed = (ends < self.near.shape[1]) & ~right, self.near.any(dim=1) & (ends == self.near.shape[1])
        return StopReport(float(false.float().mean()), float(missed.float().mean()), len(ends))


def tuned(rule: StopRule, seen: Recorded, most: float, grid: int = 24) -> StopRule:
    """The rule with the thresholds that end most episodes rightly, of those that end at most the share `most` of them wrongly.

    Thresholds are tried at `grid` quantiles of what the verifier said; the second may be out of reach as well. Where no pair keeps the
    bound, it is the pair with the fewest wrong ends. Raises InputError where `most` is outside [0, 1) or there is no episode.
    """
    if not 0 <= most < 1 or not len(seen.near):
        raise InputError(f"{most} of {len(seen.near)} episodes; the share is in [0, 1) and there is at least one", item="calibration")
    accepting = _levels(seen.probability[seen.proposed == STOP], grid)
    forcing = [*_levels(seen.probability[seen.proposed != STOP], grid), 2.0]
    ruled = [replace(rule, accept=accept, force=force) for accept in accepting for force in forcing]
    reports = [seen.report(each) for each in ruled]

    def worth(report: StopReport) -> tuple[bool, float, float]:
        keeps = report.false_stop <= most
        return keeps, -(report.false_stop + report.missed_stop if keeps else report.false_stop), -report.false_stop

    return ruled[max(range(len(ruled)), key=lambda number: worth(reports[number]))]


def _levels(probability: Float[Tensor, " n"], grid: int) -> list[float]:
    """So many thresholds above 0, the closer together the higher: it is the surest steps that are told apart."""
    if not len(probability):
        return [0.5]
    # a few of very many values tell the quantiles as well
    drawn = probability.sort().values[:: max(1, len(probability) >> 20)]
    shares = 1 - torch.linspace(0, 1, grid, dtype=drawn.dtype, device=drawn.device) ** 2
    return [max(level, torch.finfo(torch.float32).tiny) for level in dict.fromkeys(torch.quantile(drawn, shares).tolist())]
