"""The door to worlds: `mmsdk.pipeline("world-model", model)`, an action in, a frame out, for as long as one likes.

world = mmsdk.pipeline("world-model", "build/train_world/model")
frame = world.reset(seed=0, text="a red ball")
frame = world.step("left")

What the model reads of the past are pages of a memory whose tiers are bounded (`mmsdk.diffusion.world.memory`): frames that left the view
long ago come back from the host's memory or the disk where what is to be seen asks for them. Where a page lies changes no frame.
"""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk import plugins
from mmsdk.cache import cache_folder
from mmsdk.diffusion.caching import Caching, StepCache, step_cache
from mmsdk.diffusion.generate import Denoiser
from mmsdk.diffusion.guidance import scale_of
from mmsdk.diffusion.imagine import SETTINGS
from mmsdk.diffusion.types import Condition
from mmsdk.diffusion.world.hybrid import Hybrid
from mmsdk.diffusion.world.index import Kind
from mmsdk.diffusion.world.memory import Paging, WorldMemory
from mmsdk.diffusion.world.model import WorldModel, open_world_model
from mmsdk.diffusion.world.rollout import denoised, remember
from mmsdk.doors import door
from mmsdk.errors import InputError, ModelError, PluginError
from mmsdk.exclusive import Exclusive
from mmsdk.vision.intake import Source, load_image
from mmsdk.vision.pixels import check_resized
from mmsdk.vision.types import Image, Video
from mmsdk.vision.values import shown, whole

__all__ = ["World", "open_world", "paging"]

EXACT = Hybrid(share=0.0, masses=(1.0,))
"""Attention to all that is on the pages that were chosen: what a model without a trained linear part knows."""


def paging(kv: str | Paging) -> Paging:
    """How a world remembers: "pages", with knobs of `Paging` ("pages:recalled=8,fast=32"), or "window:8", the latest pages alone.

    Raises PluginError for another name or knob, InputError for numbers that cannot be.
    """
    if isinstance(kv, Paging):
        return kv
    spec = plugins.parse(kv)
    try:
        if spec.name == "window" and spec.amount and not spec.knobs:
            pages = int(plugins.number(int, spec.amount))
            return Paging(sinks=0, recent=pages, recalled=0, fast=pages + 1, host=1)
        if spec.name == "pages" and not spec.amount:
            return Paging(**{name: _kind(value) if name == "index" else plugins.number(int, value) for name, value in spec.knobs})  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        knobs = ", ".join(Paging.__dataclass_fields__)
        raise PluginError(f"{kv!r}: the knobs of pages are {knobs}, whole numbers but for the index, mean or bounds") from error
    raise PluginError(f"{kv!r} is no memory of a world; write 'pages', 'pages:recalled=8,fast=32' or 'window:8'")


def _kind(value: str) -> str:
    if value not in get_args(Kind):
        raise ValueError(value)
    return value


def open_world(name: str, dtype: torch.dtype, device: torch.device) -> WorldModel:
    """The model of a folder. Raises ModelError where there is none, or of something else, WeightsError where files are damaged."""
    folder = Path(name).expanduser()
    if not (folder / SETTINGS).is_file():
        how = "`python -m mmsdk.apps.train_video --kind world` trains one and writes its folder, build/train_world/model"
        raise ModelError(f"{name!r} is no folder of a world model, and none comes with mmsdk yet; {how}")
    return open_world_model(folder, dtype, device)


class World:
    """One world at a time; `reset` begins another. A frame is a function of the model, the seed, what it began with, and the actions.

    As a context manager it ends, and its pages go; so do they when nobody holds it any more. For several threads: a step is made to its end
    before another one, a reset or a close. Each of these raises InputError where its own thread is still amid one of them.
    """

    def __init__(
        self, model: WorldModel, name: str = "", pages: Paging = Paging(), hybrid: Hybrid = EXACT, folder: Path | None = None
    ) -> None:
        self.model, self.name, self._paging, self._hybrid = model, name, pages, hybrid
        self._folder = cache_folder() / "worlds" if folder is None else folder
        self._memory: WorldMemory | None = None
        self._first, self._alone = 0, Exclusive("world")

    def __repr__(self) -> str:
        return f"World({self.name!r}, {self._paging!r})"

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget everything; `reset` begins anew."""
        with self._alone:
            self._forget()

    @property
    def actions(self) -> tuple[str, ...]:
        """What may be done; empty where an action is a text."""
        return tuple(self.model.moves)

    @property
    def frames(self) -> int:
        """How many frames there were."""
        return self._first

    @property
    def latest(self) -> Video:
        """The frames of the last step, of which `step` gives the last. Raises InputError before `reset`."""
        if not self._first:
            raise _unbegun()
        return self._latest

    @property
    def resident(self) -> tuple[tuple[int, int, int], ...]:
        """Of each layer and pass: pages on the fast tier, in the host's memory, on disk. Raises InputError before `reset`."""
        return self._begun().resident

    @door
    def reset(
        self, seed: int = 0, first: Source | None = None, text: str = "", *, steps: int | None = None, guidance: float | None = 1.0,
        cache: str | StepCache = "none",
    ) -> Image:  # fmt: skip
        """Begin another world, and give its first frame: `first` where there is one, resized, else one that is made of the text.

        `steps` are those of each frame, the model's own where nothing is said; a `guidance` above 1 goes further towards the text, at twice
        the time and memory, and None as far as the model's own; `cache` is a step cache. Raises InputError for a picture that cannot be
        read or is too long to be resized, words that the model does not know, and numbers that cannot be, each before the world that was
        there is gone; ModelError for a frame that is not finite.
        """
        if not whole(seed, 0) or int(seed) >= 2**63 or not (steps is None or whole(steps, 1)):
            raise InputError(f"{shown(seed)} and {shown(steps)}, expected whole numbers from 0 and 1 on, below 2**63", item="seed, steps")
        condition, towards = self.model.imaginer.asked(text, scale_of(guidance))
        caching, picture = step_cache(cache), None if first is None else self._latents(load_image(first))
        with self._alone:
            self._forget()
            self._memory = WorldMemory(self._folder, self._paging, self._hybrid)
            self._generator = torch.Generator().manual_seed(int(seed))
            self._place, self._text = torch.zeros(2, dtype=torch.float64), text
            self._condition, self._guidance, self._cache, self._steps = condition, towards, caching, steps or self.model.steps
            return self._made("", picture)

    @door
    def step(self, action: str = "") -> Image:
        """The frame after an action: the name of a move, or, for a model without moves, a text for what follows ("" for as before).

        Raises InputError before `reset`, and for an action that there is not, before anything has changed. A step that is broken off, by
        Ctrl-C for one, ends the world: some layers would remember it and others not. So does a frame that is not finite, a ModelError.
        """
        with self._alone:
            self._begun()
            if self.model.moves:
                self._place = self.model.moved(self._place, action)
            elif action:
                self._condition, self._guidance = self.model.imaginer.asked(action, self._guidance.scale)
            return self._made(action, None)

    def _begun(self) -> WorldMemory:
        memory = self._memory
        if memory is None:
            raise _unbegun()
        return memory

    def _forget(self) -> None:
        memory, self._memory, self._first = self._memory, None, 0
        if memory is not None:
            memory.__exit__()

    def _made(self, action: str, latents: Tensor | None) -> Image:
        try:
            return self._next(action, latents)
        except BaseException:
            self._forget()
            raise

    @torch.no_grad()
    def _next(self, action: str, latents: Tensor | None) -> Image:
        """Make the next frames, or take them as they are, and remember them."""
        memory, model, imaginer = self._begun(), self.model.imaginer.model, self.model.imaginer
        shape = imaginer.shape(imaginer.screen)
        condition, guidance = self._placed(self._condition, shape[2]), self._guidance
        guidance = replace(guidance, against=self._placed(guidance.against, shape[2]))
        if latents is None:
            schedule, noise = imaginer.schedule(self._steps, shape), torch.randn(shape, generator=self._generator).to(model.like)
            denoiser = Denoiser(model, condition, guidance, schedule.steps, memory, Caching(self._cache), self._first)
            latents = denoised(denoiser, noise, schedule)
            if not bool(latents.isfinite().all()):
                raise ModelError(f"frame {self._first + 1} has values that are no numbers; dtype='float32' may help")
        remember(model, latents, condition, memory, self._first, guidance)
        moments = (self._first + torch.arange(shape[2])) / imaginer.screen.rate
        self._latest = Video(imaginer.pixels(latents), moments, source=action or self._text or "world")
        # counted when they are there to be looked at
        self._first += shape[2]
        return Image(self._latest.frames[-1], source=f"frame {self._first}")

    def _placed(self, condition: Condition, frames: int) -> Condition:
        if not self.model.moves:
            return condition
        return replace(condition, places=self._place.float().expand(1, frames, 2).to(condition.text.device))

    def _latents(self, picture: Image) -> Float[Tensor, "1 c t h w"]:
        """The frames that a picture stands for: itself, as often as a step makes frames. Raises InputError as `check_resized` does."""
        imaginer = self.model.imaginer
        _, _, frames, height, width = imaginer.shape(imaginer.screen)
        check_resized((picture.pixels.shape[-2], picture.pixels.shape[-1]), (height, width))
        small = F.interpolate(picture.pixels[None].float() / 127.5 - 1, (height, width), mode="bilinear", antialias=True)
        return small[:, :, None].expand(-1, -1, frames, -1, -1).to(imaginer.model.like)


def _unbegun() -> InputError:
    return InputError("there is no world yet; begin with reset(seed=0)", item="world")
