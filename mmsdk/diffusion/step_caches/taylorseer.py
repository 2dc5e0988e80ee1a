"""TaylorSeer: what the layers would do is extrapolated from what they did, by finite differences.

From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers (arXiv 2503.06923). Published: features are computed every
`interval` steps, and between them follow a Taylor expansion whose derivatives are differences of computed ones; intervals and warm-up are
those of diffusers (TaylorSeerCacheConfig). Ours: the feature is the residual of all layers together, one tensor for each order, rather than
the output of every module.
"""

import math
from dataclasses import dataclass

from mmsdk.diffusion.caching import Kept, Pass, Passed
from mmsdk.errors import PluginError

__all__ = ["TaylorSeer"]


@dataclass(frozen=True, slots=True)
class TaylorSeer:
    """Computed are steps below `warm` and every `interval`-th from `warm` + 1 on; an `interval` of 1 skips nothing."""

    interval: int = 5
    warm: int = 3
    order: int = 1

    def __post_init__(self) -> None:
        if self.interval < 1 or self.warm < 0 or self.order < 0:
            raise PluginError(f"taylorseer: {self} needs an interval of at least 1; warm and order are not below 0")

    def __call__(self, run: Pass) -> Passed:
        """See `mmsdk.diffusion.caching.StepCache`."""
        due = run.forced or run.step < self.warm or (run.step - self.warm - 1) % self.interval == 0
        if not due and run.kept.tensors:
            ahead = run.step - run.kept.numbers[0]
            expected = sum(part * (ahead**order / math.factorial(order)) for order, part in enumerate(run.kept.tensors))
            return Passed(run.x + expected, run.kept, skipped=True)
        out = run.whole()
        parts = [out - run.x]
        for before in run.kept.tensors[: self.order]:
            parts.append((parts[-1] - before) / (run.step - run.kept.numbers[0]))
        return Passed(out, Kept(tuple(parts), (float(run.step),)))
