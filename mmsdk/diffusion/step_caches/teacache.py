"""TeaCache: steps are skipped until the model's input has changed enough for its output to have changed.

Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model (arXiv 2411.19108). Published: the relative L1 change of the first
layer's modulated input, from each step to the next, goes through a polynomial fitted to the model and is summed up; below a threshold the
residual of all layers is added again, else they run and the sum begins at 0; the first and the last step are computed.

The polynomials belong to their models and are not here: without one, the change itself is summed.
"""

from dataclasses import dataclass

from mmsdk.diffusion.caching import Kept, Pass, Passed
from mmsdk.errors import PluginError

__all__ = ["TeaCache"]


@dataclass(frozen=True, slots=True)
class TeaCache:
    """`threshold` is the summed change from which a step is computed; `coefficients` of the polynomial, highest power first."""

    threshold: float = 0.1
    coefficients: str = "1 0"

    def __post_init__(self) -> None:
        try:
            self._polynomial(0.0)
        except ValueError as error:
            raise PluginError(f"teacache: coefficients are numbers with spaces between them, not {self.coefficients!r}") from error

    def __call__(self, run: Pass) -> Passed:
        """See `mmsdk.diffusion.caching.StepCache`."""
        now = run.modulated(run.x)
        if run.kept.tensors and not run.forced:
            (before, residual), (total,) = run.kept.tensors, run.kept.numbers
            total += self._polynomial(float((now - before).abs().mean() / before.abs().mean()))
            if self.threshold > 0 and total < self.threshold:
                return Passed(run.x + residual, Kept((now, residual), (total,)), skipped=True)
        out = run.whole()
        return Passed(out, Kept((now, out - run.x), (0.0,)))

    def _polynomial(self, change: float) -> float:
        value = 0.0
        for coefficient in self.coefficients.split():
            value = value * change + float(coefficient)
        return value
