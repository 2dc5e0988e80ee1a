"""First-block cache: where the first layer changes its tokens as it did, the others are taken to do so, too.

Published as ParaAttention's dynamic caching and in diffusers (FirstBlockCacheConfig): the first layer always runs; the mean absolute change
of its residual, relative to that of the last step that was computed, is held against a threshold, and below it the others' residual of then
is added again. Ours: exactly at the threshold it computes, so that 0 skips nothing.
"""

from dataclasses import dataclass

from mmsdk.diffusion.caching import Kept, Pass, Passed

__all__ = ["FirstBlock"]


@dataclass(frozen=True, slots=True)
class FirstBlock:
    """`threshold` is the relative change up to which the residual of the other layers is used again."""

    threshold: float = 0.05

    def __call__(self, run: Pass) -> Passed:
        """See `mmsdk.diffusion.caching.StepCache`."""
        head = run.layers[0](run.x)
        change = head - run.x
        if run.kept.tensors and not run.forced:
            before, tail = run.kept.tensors
            if float((change - before).abs().mean() / before.abs().mean()) < self.threshold:
                return Passed(head + tail, run.kept, skipped=True)
        out = run.further(head, 1)
        return Passed(out, Kept((change, out - head)))
