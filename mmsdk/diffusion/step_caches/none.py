"""Every layer at every step."""

from dataclasses import dataclass

from mmsdk.diffusion.caching import Kept, Pass, Passed

__all__ = ["NoCache"]


@dataclass(frozen=True, slots=True)
class NoCache:
    """Keeps nothing."""

    def __call__(self, run: Pass) -> Passed:
        """See `mmsdk.diffusion.caching.StepCache`."""
        return Passed(run.whole(), Kept())
