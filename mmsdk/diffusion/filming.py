"""The door to clips of texts: `mmsdk.pipeline("video-generation", model)`.

pipe = mmsdk.pipeline("video-generation", "build/train_video/model")
clip = pipe("a red ball moves left behind a blue box", seed=0, steps=20, attention="svg2:0.8", cache="teacache", two_stage=True)
clip.save("ball.mp4")
clips = pipe(["a red ball moves up", "a blue cross moves down"])

A model is a folder: one that `python -m mmsdk.apps.train_video` wrote, a pipeline's of diffusers (Wan, LTX, CogVideoX, HunyuanVideo), or
"org/name" of such a one on the hub.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import overload

import torch
from tqdm import tqdm

from mmsdk.diffusion.attending import attending
from mmsdk.diffusion.attention.types import Selector
from mmsdk.diffusion.borrowed import borrowed
from mmsdk.diffusion.caching import StepCache, step_cache
from mmsdk.diffusion.clip import Clip
from mmsdk.diffusion.generate import to_nobody
from mmsdk.diffusion.guidance import scale_of
from mmsdk.diffusion.imagine import open_imaginer
from mmsdk.diffusion.making import Maker, Screen, Way, made
from mmsdk.doors import door
from mmsdk.errors import InputError, MmsdkError, ModelError
from mmsdk.named import HOW_TO_FILM, check_maker
from mmsdk.vision.values import shown, whole
from mmsdk.weights.hub import resolve
from mmsdk.weights.parts import INDEX

__all__ = ["VideoGeneration", "open_maker"]

_WANTED = (INDEX, *(f"{part}*/*.{kind}" for part in ("transformer", "text_encoder", "tokenizer", "vae", "scheduler") for kind in
           ("json", "safetensors", "txt", "model")))  # fmt: skip


@dataclass(frozen=True, slots=True)
class VideoGeneration:
    """Makes clips of texts. Calls share nothing; a clip is a function of its text, its settings and its seed."""

    maker: Maker
    name: str = ""
    progress: bool = True

    def __repr__(self) -> str:
        return f"VideoGeneration({self.name!r}, {self.maker.screen!r})"

    @overload
    def __call__(
        self, text: str, *, seed: int = ..., steps: int | None = ..., guidance: float | None = ..., against: str = ...,
        attention: str | Selector = ..., cache: str | StepCache = ..., two_stage: bool | int | float = ..., frames: int = ...,
        height: int = ..., width: int = ..., advance: Callable[[int], None] = ...,
    ) -> Clip: ...  # fmt: skip

    @overload
    def __call__(
        self, text: list[str] | tuple[str, ...], *, seed: int | Sequence[int] = ..., steps: int | None = ..., guidance: float | None = ...,
        against: str = ..., attention: str | Selector = ..., cache: str | StepCache = ..., two_stage: bool | int | float = ...,
        frames: int = ..., height: int = ..., width: int = ..., advance: Callable[[int], None] = ...,
    ) -> list[Clip | MmsdkError]: ...  # fmt: skip

    @door
    def __call__(
        self,
        text: str | list[str] | tuple[str, ...],
        *,
        seed: int | Sequence[int] = 0,
        steps: int | None = None,
        guidance: float | None = None,
        against: str = "",
        attention: str | Selector = "dense",
        cache: str | StepCache = "none",
        two_stage: bool | int | float = False,
        frames: int = 0,
        height: int = 0,
        width: int = 0,
        advance: Callable[[int], None] = to_nobody,
    ) -> Clip | list[Clip | MmsdkError]:
        """The clip of a text; of a list of texts one each, made one after the other, an error standing in the place of its clip.

        `steps` and `guidance` are the model's own where nothing is said; guidance goes away from the text `against`. `attention` is
        "dense" or a method ("svg2", "svg2:0.8", "nabla:mass=0.9"), `cache` "none" or a step cache ("teacache", "first_block:0.05").
        `two_stage` takes the first steps at half the size: True half of them, a share, written with a point, or a count. `frames`,
        `height` and `width` are the model's own where they are 0. `seed` may be a list, one for each text. `advance` is told how many
        steps are done, those of all clips together; what it raises ends the call.

        Raises InputError for what cannot be made, PluginError for methods that there are not, ModelError for latents that are not finite.
        """
        texts, seeds = _texts(text, seed)
        screen, taken = self.maker.screen.sized(frames, height, width), _steps(steps, self.maker.steps)
        # what is wrong with the words is told before minutes are spent
        attending(attention), step_cache(cache), self.maker.shape(screen)
        coarse, scale = _coarse(two_stage, taken), scale_of(guidance)
        clips = list[Clip | MmsdkError]()
        with _told(taken * len(texts), self.progress) as bar:

            def done(step: int) -> None:
                bar(len(clips) * taken + step)
                advance(len(clips) * taken + step)

            for index, (one, number) in enumerate(zip(texts, seeds, strict=True)):
                way = Way(number, taken, scale, against, coarse, attention, cache)
                clips.append(self._one(one, screen, way, done, None if isinstance(text, str) else index))
        (first, *_) = clips or [InputError("there is no text", item="text")]
        if not isinstance(text, str):
            return clips
        if isinstance(first, MmsdkError):
            raise first
        return first

    def _one(self, text: str, screen: Screen, way: Way, advance: Callable[[int], None], index: int | None) -> Clip | MmsdkError:
        try:
            if not isinstance(text, str):
                raise InputError(f"{shown(text)} is no text", item="text")
            clip = made(self.maker, text, screen, way, advance)
            if not bool(clip.latents.isfinite().all()):
                raise ModelError(f"the clip of {shown(text)} has values that are no numbers; dtype='float32' may help")
            return clip
        except MmsdkError as error:
            return error.at(index) if isinstance(error, InputError) else error


def open_maker(name: str, dtype: torch.dtype, device: torch.device) -> Maker:
    """The maker of a folder, or of "org/name" on the hub.

    Raises ModelError where no model is of that name or it cannot be run, WeightsError where files are missing or damaged.
    """
    check_maker(name)
    folder = resolve(name, _WANTED, nested=True)
    if (folder / INDEX).is_file():
        return borrowed(folder, dtype, device)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has neither {INDEX} nor config.json, so that it is no video model; {HOW_TO_FILM}")
    return open_imaginer(folder, dtype, device)


def _texts(text: object, seed: object) -> tuple[list[str], list[int]]:
    if not isinstance(text, str | list | tuple):
        raise InputError(f"{shown(text)} is no text and no list of texts", item="text")
    texts = [text] if isinstance(text, str) else list(text)
    seeds: list[object] = list(seed) if isinstance(seed, list | tuple) else [seed] * len(texts)
    if len(seeds) != len(texts):
        raise InputError(f"{len(seeds)} seeds for {len(texts)} texts", item="seed")
    wrong = [number for number in seeds if not whole(number, 0) or int(number) >= 2**63]
    if wrong:
        raise InputError(f"it is {shown(wrong[0])}, expected a whole number from 0 to 2**63 - 1", item="seed")
    return texts, [int(number) for number in seeds if whole(number, 0)]


def _steps(steps: object, usual: int) -> int:
    if steps is None:
        return usual
    if not whole(steps, 1):
        raise InputError(f"it is {shown(steps)}, expected a whole number of at least 1", item="steps")
    return int(steps)


def _coarse(two_stage: object, steps: int) -> int:
    """How many steps are taken at half the size; never all, since one of them makes the edges."""
    if isinstance(two_stage, bool):
        return steps // 2 if two_stage else 0
    if isinstance(two_stage, float) and 0 <= two_stage < 1:
        return min(steps - 1, round(two_stage * steps))
    if whole(two_stage, 0) and int(two_stage) < steps:
        return int(two_stage)
    raise InputError(f"it is {shown(two_stage)}; it is True, a share below 1.0, or a count below the {steps} steps", item="two_stage")


@contextmanager
def _told(steps: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """A bar of the steps on stderr, gone when it has ended, where that is a terminal."""
    if not wanted or sys.stderr is None or not sys.stderr.isatty():
        yield to_nobody
        return
    with tqdm(total=steps, desc="imagining", unit="step", leave=False) as bar:

        def advance(step: int) -> None:
            bar.update(step - bar.n)

        yield advance
