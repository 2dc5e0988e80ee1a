"""Step caches: layers that are not run again where they would do nearly what they did at the step before.

A method (`mmsdk.diffusion.step_caches`, one file each) is a function from a pass through the layers, and what it kept, to an output and
what it keeps. What is kept belongs to one generation and one pass of the guidance; the first and the last step are always computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from mmsdk import plugins
from mmsdk.diffusion.types import Layer, Through
from mmsdk.errors import PluginError

__all__ = ["CACHES", "Caching", "Kept", "Pass", "Passed", "StepCache", "step_cache"]

CACHES = "mmsdk.diffusion.step_caches"


@dataclass(frozen=True, slots=True)
class Kept:
    """What a method remembers; nothing before the first step."""

    tensors: tuple[Tensor, ...] = ()
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of tokens through the layers. `forced` where it must be computed; `modulated` makes what the first layer's attention reads."""

    x: Float[Tensor, "b n d"]
    layers: Sequence[Layer]
    modulated: Layer
    step: int
    steps: int
    kept: Kept
    forced: bool

    def whole(self) -> Float[Tensor, "b n d"]:
        """Through all layers."""
        return self.further(self.x, 0)

    def further(self, x: Float[Tensor, "b n d"], layer: int) -> Float[Tensor, "b n d"]:
        """Through the layers from one on."""
        for run in self.layers[layer:]:
            x = run(x)
        return x


@dataclass(frozen=True, slots=True)
class Passed:
    """Tokens behind the layers, what is kept, and whether layers were skipped."""

    out: Float[Tensor, "b n d"]
    kept: Kept
    skipped: bool = False


@runtime_checkable
class StepCache(Protocol):
    """A method. Pure and deterministic; a threshold of 0 skips nothing."""

    def __call__(self, run: Pass) -> Passed: ...


class Caching:
    """The cache of one generation: what each pass of the guidance keeps, and how often layers were skipped."""

    def __init__(self, method: StepCache) -> None:
        self._method = method
        self._kept: dict[str, tuple[tuple[int, ...], Kept]] = {}
        self._skipped: dict[str, int] = {}

    @property
    def skipped(self) -> Mapping[str, int]:
        """Steps of each pass that were not computed as a whole."""
        return dict(self._skipped)

    def numbers(self, branch: str) -> tuple[float, ...]:
        """The numbers that the method keeps for a pass."""
        return self._kept[branch][1].numbers

    def at(self, step: int, steps: int, branch: str) -> Through:
        """What runs the layers at a step."""
        return _Run(self, step, steps, branch)

    def run(self, run: Pass, branch: str) -> Float[Tensor, "b n d"]:
        """One pass; tokens of another shape than before begin anew."""
        shape = tuple(run.x.shape)
        before, kept = self._kept.get(branch, (shape, Kept()))
        passed = self._method(replace(run, kept=kept if before == shape else Kept()))
        self._kept[branch] = (shape, passed.kept)
        self._skipped[branch] = self._skipped.get(branch, 0) + passed.skipped
        return passed.out


@dataclass(frozen=True, slots=True)
class _Run:
    caching: Caching
    step: int
    steps: int
    branch: str

    def __call__(self, x: Float[Tensor, "b n d"], layers: Sequence[Layer], modulated: Layer) -> Float[Tensor, "b n d"]:
        forced = self.step in (0, self.steps - 1)
        return self.caching.run(Pass(x, layers, modulated, self.step, self.steps, Kept(), forced), self.branch)


def step_cache(method: str | StepCache) -> StepCache:
    """A method by name; a bare value is that of its first knob ("first_block:0.05"). Raises PluginError for an unknown one."""
    if not isinstance(method, str):
        return method
    spec = plugins.parse(method)
    if spec.amount:
        names = list(plugins.knobs(CACHES, spec.name))
        if not names:
            raise PluginError(f"{method!r}: {spec.name!r} has no knob to set")
        spec = plugins.Spec(spec.name, "", ((names[0], spec.amount), *spec.knobs))
    built = plugins.build(CACHES, spec)
    if not isinstance(built, StepCache):
        raise PluginError(f"{method!r} is no step cache: it cannot be called")
    return built
