"""From a sentence to a clip: a model of few words with all that it needs, from one folder.

    imagine = open_imaginer("build/train_video/model")
    imagine("a red ball moves left behind a blue box", seed=0, steps=20)      # a Clip, which is a Video

Every way to make it faster is an argument: a method of sparse attention, a step cache, and first steps at half the size.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mmsdk.diffusion.attention.types import Selector
from mmsdk.diffusion.caching import StepCache
from mmsdk.diffusion.checkpoint import read, write, write_weights
from mmsdk.diffusion.clip import Clip
from mmsdk.diffusion.dit import DiT
from mmsdk.diffusion.generate import to_nobody
from mmsdk.diffusion.guidance import ClassifierFree
from mmsdk.diffusion.making import Screen, Shape, Way, made
from mmsdk.diffusion.models import small
from mmsdk.diffusion.schedule import Schedule, flow, grown_shift
from mmsdk.diffusion.two_stage import Upscaler
from mmsdk.diffusion.types import Condition
from mmsdk.diffusion.upscale import bilinear, open_upscaler
from mmsdk.diffusion.words import Words
from mmsdk.errors import InputError, ModelError
from mmsdk.weights.fields import Fields, read_fields
from mmsdk.weights.safetensors import open_file

__all__ = ["SETTINGS", "UPSCALER", "Imaginer", "Screen", "open_imaginer", "pixels", "save_imaginer"]

_SCALE, _STEPS = 3.0, 20
UPSCALER = "upscaler.safetensors"
SETTINGS, _WEIGHTS, _WORDS = "config.json", "diffusion_pytorch_model.safetensors", "words.safetensors"


@dataclass(frozen=True, slots=True)
class Imaginer:
    """A model of pixels, its words, and the size it was trained for; see `mmsdk.diffusion.making.Maker`.

    `scale` is how far guidance goes where a call does not say; `upscaler` makes coarse clips finer between two stages.
    """

    model: DiT
    words: Words
    screen: Screen = Screen()
    scale: float = _SCALE
    upscaler: Upscaler = bilinear

    def __call__(
        self,
        text: str,
        *,
        seed: int = 0,
        steps: int = _STEPS,
        scale: float | None = None,
        coarse: int = 0,
        attention: str | Selector = "dense",
        cache: str | StepCache = "none",
        advance: Callable[[int], None] = to_nobody,
    ) -> Clip:
        """The clip of a sentence. The first `coarse` of the steps are taken at half the size; `advance` is told how many steps are done.

        Raises InputError for words that the model does not know, and for steps that cannot be, PluginError for unknown methods.
        """
        way = Way(seed, steps, scale, coarse=coarse, attention=attention, cache=cache)
        return made(self, text, self.screen, way, advance)

    @property
    def transformer(self) -> DiT:
        """See `Maker`."""
        return self.model

    @property
    def steps(self) -> int:
        """See `Maker`."""
        return _STEPS

    def shape(self, screen: Screen) -> Shape:
        """Of what the model makes: [1, 3, frames, height, width]. Raises InputError for sides that its patches do not divide."""
        sides = (screen.frames, screen.height, screen.width)
        for name, side, size in zip(("frames", "height", "width"), sides, self.model.config.patch, strict=True):
            if side % size:
                raise InputError(f"it is {side}; this model makes multiples of {size}", item=name)
        return 1, self.model.config.channels, *sides

    def schedule(self, steps: int, shape: Shape) -> Schedule:
        """Steps with the shift that was trained at the model's size, and less of it where there are fewer tokens."""
        return flow(steps, grown_shift(self.screen.shift, math.prod(shape[2:]), math.prod(self.shape(self.screen)[2:])))

    def asked(self, text: str, scale: float | None = None, against: str = "") -> tuple[Condition, ClassifierFree]:
        """The sentence as the model reads it, and the guidance towards it. Raises InputError for words that the model does not know."""
        condition, other = (self.words(self.words.numbers([told])) for told in (text, against))
        return condition, ClassifierFree(other, self.scale if scale is None else scale)

    def noise(self, generator: torch.Generator) -> Float[Tensor, "1 c t h w"]:
        """What a clip begins as."""
        return torch.randn(self.shape(self.screen), generator=generator).to(self.model.like)

    def pixels(self, latents: Float[Tensor, "1 c t h w"]) -> UInt8[Tensor, "t c h w"]:
        """The model's latents are pixels."""
        return pixels(latents[0])


def pixels(clip: Float[Tensor, "c t h w"]) -> UInt8[Tensor, "t c h w"]:
    """Frames of bytes from values between -1 and 1; what lies beyond is cut."""
    return ((clip.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).transpose(0, 1).contiguous().cpu()


def open_imaginer(folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Imaginer:
    """The model of a folder that `mmsdk.apps.train_video` wrote, with its upscaler where that was trained, too.

    Raises ModelError for a folder of something else, and for tensors that are not its own, WeightsError where files are missing or damaged.
    """
    folder = Path(folder)
    fields = read_fields(folder / SETTINGS)
    if fields.text("_class_name", "") != small.CLASS:
        raise fields.wrong("_class_name", f"{small.CLASS!r}: only such a model brings its words with it")
    model = read(folder, small.FAMILY, dtype, torch.device(device))
    stored = open_file(folder / _WORDS)
    words = Words(fields.text("words").split(), model.config.text_width, fields.whole("max_words"))
    for name, like in words.state_dict().items():
        if stored.shape(name) != tuple(like.shape):
            raise ModelError(f"{folder / _WORDS}: {name} is {stored.shape(name)}, not {tuple(like.shape)}")
    words.load_state_dict({name: stored.tensor(name) for name in words.state_dict()})
    screen, finer = _screen(fields), folder / UPSCALER
    upscaler = open_upscaler(finer, model.config.channels, dtype, device) if finer.is_file() else bilinear
    return Imaginer(model, words.to(model.like).requires_grad_(False), screen, fields.real("guidance_scale", _SCALE), upscaler)


def save_imaginer(
    folder: Path, imagine: Imaginer, dtype: torch.dtype = torch.bfloat16, further: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Write a folder that `open_imaginer` reads; each file whole or not at all, the settings last, and `further` ones in their file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in ((_WEIGHTS, imagine.model), (_WORDS, imagine.words)):
        write_weights(folder / name, module, dtype)
    screen, words = imagine.screen, imagine.words
    told: Mapping[str, object] = {
        **small.settings(imagine.model.config),
        "frames": screen.frames,
        "height": screen.height,
        "width": screen.width,
        "fps": screen.rate,
        "shift": screen.shift,
        "guidance_scale": imagine.scale,
        "words": " ".join(words.vocabulary),
        "max_words": words.length,
        **further,
    }
    write(folder / SETTINGS, json.dumps(told, indent=2).encode())


def _screen(fields: Fields) -> Screen:
    usual = Screen()
    return Screen(
        fields.whole("frames", usual.frames),
        fields.whole("height", usual.height),
        fields.whole("width", usual.width),
        fields.real("fps", usual.rate),
        fields.real("shift", usual.shift),
    )
