"""From a text to a clip, by whatever makes one: what a maker offers, and how it is asked.

A maker is a transformer with all that stands around it: how it reads text, how large its clips are, which steps fit them, and how latents
become pixels. `mmsdk.diffusion.imagine.Imaginer` is ours, `mmsdk.diffusion.borrowed.Borrowed` a folder of diffusers.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mmsdk.diffusion.attention.types import Selector
from mmsdk.diffusion.caching import StepCache
from mmsdk.diffusion.clip import Clip, Timings
from mmsdk.diffusion.generate import generate, to_nobody
from mmsdk.diffusion.guidance import Guidance
from mmsdk.diffusion.schedule import Schedule
from mmsdk.diffusion.two_stage import Stages, Upscaler, generate_in_two_stages
from mmsdk.diffusion.types import Condition, Transformer
from mmsdk.errors import InputError
from mmsdk.vision.values import shown, whole

__all__ = ["Maker", "Screen", "Shape", "Way", "made"]

Shape = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Screen:
    """What a model's clips are: frames, rows and columns of pixels, frames a second; and the shift of its steps at that size."""

    frames: int = 16
    height: int = 64
    width: int = 64
    rate: float = 8.0
    shift: float = 8.0

    def sized(self, frames: int = 0, height: int = 0, width: int = 0) -> "Screen":
        """With these in the place of its own, where they are not 0. Raises InputError for what is no size."""
        for name, size in (("frames", frames), ("height", height), ("width", width)):
            if not whole(size, 0):
                raise InputError(f"it is {shown(size)}, expected a whole number, or 0 for the model's own", item=name)
        return replace(self, frames=frames or self.frames, height=height or self.height, width=width or self.width)


@runtime_checkable
class Maker(Protocol):
    """What makes clips of texts. `steps` and `scale` are those of a call that does not say."""

    @property
    def transformer(self) -> Transformer: ...

    @property
    def screen(self) -> Screen: ...

    @property
    def steps(self) -> int: ...

    @property
    def scale(self) -> float: ...

    @property
    def upscaler(self) -> Upscaler: ...

    def asked(self, text: str, scale: float | None = None, against: str = "") -> tuple[Condition, Guidance]:
        """The text as the model reads it, and the guidance towards it. Raises InputError for a text that it cannot read."""
        ...

    def shape(self, screen: Screen) -> Shape:
        """Of the latents of a clip. Raises InputError for a size that it does not make."""
        ...

    def schedule(self, steps: int, shape: Shape) -> Schedule:
        """So many steps, as they fit latents of a shape."""
        ...

    def pixels(self, latents: Float[Tensor, "1 c f h w"]) -> UInt8[Tensor, "t 3 h2 w2"]:
        """The frames of a clip of latents."""
        ...


@dataclass(frozen=True, slots=True)
class Way:
    """How a clip is made: noise by `seed`, `coarse` of the `steps` at half the size, attention, cache, and what guidance goes from and how
    far; no scale is the maker's own.
    """

    seed: int
    steps: int
    scale: float | None = None
    against: str = ""
    coarse: int = 0
    attention: str | Selector = "dense"
    cache: str | StepCache = "none"


@torch.no_grad()
def made(maker: Maker, text: str, screen: Screen, way: Way, advance: Callable[[int], None] = to_nobody) -> Clip:
    """The clip of a text; `advance` is told how many steps are done.

    Raises InputError for a text that cannot be read, and for sizes and steps that cannot be, PluginError for unknown methods.
    """
    if not 0 <= way.coarse < way.steps:
        raise InputError(f"it is {way.coarse}, of {way.steps} steps; at least one is taken at the full size", item="coarse")
    shape, generator, begun = maker.shape(screen), torch.Generator().manual_seed(way.seed), time.perf_counter()
    condition, guidance = maker.asked(text, way.scale, way.against)
    told, schedule = time.perf_counter(), maker.schedule(way.steps, shape)
    if way.coarse:
        low = maker.schedule(way.steps, (*shape[:3], shape[3] // 2, shape[4] // 2))
        stages = Stages(low, schedule, way.steps - way.coarse)
        done = generate_in_two_stages(
            maker.transformer, shape, condition, stages, generator, maker.upscaler, guidance, way.attention, way.cache, advance
        )
    else:
        noise = torch.randn(shape, generator=generator).to(maker.transformer.like)
        done = generate(maker.transformer, noise, condition, schedule, guidance, way.attention, way.cache, advance)
    denoised = time.perf_counter()
    frames = maker.pixels(done.latents)
    times = 1000 * (told - begun), 1000 * (denoised - told), 1000 * (time.perf_counter() - denoised)
    moments = torch.arange(len(frames)) / screen.rate
    return Clip(frames, moments, source=text, latents=done.latents, cost=done.cost, timings=Timings(*times), seed=way.seed)
