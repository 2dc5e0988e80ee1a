"""MagCache: how the size of the layers' residual changes from step to step is known beforehand, and how much error skipping would add up.

MagCache: Fast Video Generation with Magnitude-Aware Cache (arXiv 2506.09045). Published, as diffusers has it (MagCacheConfig): the ratios
of a model are multiplied up while steps are skipped, their distances from 1 summed; below a threshold, and no more than so many times in a
row, the last residual of all layers is added again; the first fifth of the steps is computed. Ratios are measured once for each model
(`mmsdk.diffusion.magnitudes`) and taken at the nearest step where the number of steps is another.
"""

from dataclasses import dataclass

from mmsdk.diffusion.caching import Kept, Pass, Passed
from mmsdk.errors import PluginError

__all__ = ["MagCache"]


@dataclass(frozen=True, slots=True)
class MagCache:
    """`ratios` with spaces between them, one for each step; `most` is how many steps in a row are skipped, `retained` the first share."""

    threshold: float = 0.06
    ratios: str = ""
    most: int = 3
    retained: float = 0.2

    def __post_init__(self) -> None:
        try:
            known = [float(ratio) for ratio in self.ratios.split()]
        except ValueError as error:
            raise PluginError(f"magcache: ratios are numbers with spaces between them, not {self.ratios!r}") from error
        if not known:
            raise PluginError("magcache needs the model's ratios: measure them with mmsdk.diffusion.magnitudes.measured")

    def __call__(self, run: Pass) -> Passed:
        """See `mmsdk.diffusion.caching.StepCache`."""
        ratio, error, in_row = run.kept.numbers or (1.0, 0.0, 0.0)
        if run.step >= int(self.retained * run.steps + 0.5):
            ratio, in_row = ratio * self._ratio(run.step, run.steps), in_row + 1
            error += abs(1 - ratio)
            if run.kept.tensors and not run.forced and error < self.threshold and in_row <= self.most:
                return Passed(run.x + run.kept.tensors[0], Kept(run.kept.tensors, (ratio, error, in_row)), skipped=True)
        out = run.whole()
        return Passed(out, Kept((out - run.x,)))

    def _ratio(self, step: int, steps: int) -> float:
        known = self.ratios.split()
        place = round(step * (len(known) - 1) / (steps - 1)) if steps > 1 else -1
        return float(known[place])
