"""Makers of clips from folders in diffusers' layout: our transformer, steps, attention and caches; their text encoder and autoencoder.

How a text is tokenised, padded and embedded is left to diffusers' own pipeline of the family, put together from the folder's parts without
its transformer. One entry a family says what is asked of that pipeline and how its latents are scaled. Steps are Euler's, with the shift of
the folder's scheduler, whichever solver that is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mmsdk.diffusion.dit import DiT
from mmsdk.diffusion.guidance import ClassifierFree, Distilled, Guidance
from mmsdk.diffusion.imagine import pixels
from mmsdk.diffusion.joint import JointDiT
from mmsdk.diffusion.making import Screen, Shape
from mmsdk.diffusion.models import load
from mmsdk.diffusion.schedule import Schedule, evenly, flow, flow_by_length
from mmsdk.diffusion.shared import SharedDiT
from mmsdk.diffusion.two_stage import Upscaler
from mmsdk.diffusion.types import Condition
from mmsdk.diffusion.upscale import bilinear
from mmsdk.errors import InputError, ModelError
from mmsdk.vision.values import shown
from mmsdk.weights.fields import Fields
from mmsdk.weights.parts import Parts, library

__all__ = ["PIPELINES", "Borrowed", "borrowed"]

Model = DiT | JointDiT | SharedDiT
_LARGE = Screen(77, 768, 1360, 16.0)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of diffusers' pipelines: the classes of its parts, what its clips are, and what is done in its own way."""

    autoencoder: str
    encoders: Mapping[str, str]
    screen: Screen
    scale: float
    told: Callable[[Any, str, str, torch.device], tuple[Condition, Condition]]
    schedule: Callable[[Model, Fields, int, Shape], Schedule]
    decoded: Callable[[Any, Tensor], Tensor]
    ratios: tuple[str, str] = ("vae_scale_factor_temporal", "vae_scale_factor_spatial")
    distilled: bool = False


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A folder's model; see `mmsdk.diffusion.making.Maker`. `pipe` is diffusers' pipeline without its transformer."""

    transformer: Model
    pipe: Any
    kind: _Kind
    scheduler: Fields
    steps: int = 50

    @property
    def screen(self) -> Screen:
        """What the family's clips are; those of CogVideoX 1.5, whose patches are of two frames, are larger."""
        return _LARGE if isinstance(self.transformer, SharedDiT) and self.transformer.config.patch[0] == 2 else self.kind.screen

    @property
    def scale(self) -> float:
        """What diffusers takes where nothing is said."""
        return self.kind.scale

    @property
    def upscaler(self) -> Upscaler:
        """None was trained for these."""
        return bilinear

    def asked(self, text: str, scale: float | None = None, against: str = "") -> tuple[Condition, Guidance]:
        """See `Maker`. Raises InputError for what one goes from where the model has its guidance distilled into it."""
        goes = self.scale if scale is None else scale
        condition, other = self.kind.told(self.pipe, text, against, self.transformer.like.device)
        if not self.kind.distilled:
            return condition, ClassifierFree(other, goes)
        if against:
            raise InputError(
                f"guidance is distilled into this model, which is not told what to go from; leave out {against!r}", item="against"
            )
        return replace(condition, guidance=goes), Distilled()

    def shape(self, screen: Screen) -> Shape:
        """See `Maker`."""
        frames, side = (int(getattr(self.pipe, name)) for name in self.kind.ratios)
        patch = self.transformer.config.patch
        if (screen.frames - 1) % frames:
            raise InputError(f"it is {screen.frames}; this model makes one more than a multiple of {frames}", item="frames")
        for name, size, cells in (("height", screen.height, patch[1]), ("width", screen.width, patch[2])):
            if size % (side * cells):
                raise InputError(f"it is {size}; this model makes multiples of {side * cells}", item=name)
        latents = (screen.frames - 1) // frames + 1
        if latents % patch[0]:
            raise InputError(f"they make {latents} frames of latents; this model takes multiples of {patch[0]}", item="frames")
        return 1, self.transformer.config.out_channels, latents, screen.height // side, screen.width // side

    def schedule(self, steps: int, shape: Shape) -> Schedule:
        """See `Maker`."""
        return self.kind.schedule(self.transformer, self.scheduler, steps, shape)

    def pixels(self, latents: Float[Tensor, "1 c f h w"]) -> UInt8[Tensor, "t 3 h2 w2"]:
        """See `Maker`."""
        return pixels(self.kind.decoded(self.pipe, latents.to(self.pipe.vae.dtype))[0])


def borrowed(folder: Path, dtype: torch.dtype, device: torch.device) -> Borrowed:
    """The maker of a pipeline's folder.

    Raises ModelError for a pipeline of another family, for parts that are missing or of another class, and for a transformer that cannot be
    run from a text alone, naming it; WeightsError where files are missing or damaged, or are pickles.
    """
    parts = Parts.of(folder)
    if parts.kind not in PIPELINES:
        raise ModelError(f"{folder} is of a {parts.kind}; clips are made by {', '.join(PIPELINES)}")
    if parts.has("transformer_2"):
        raise ModelError(f"{folder}: it has a second transformer, transformer_2, for cleaner steps; only models of one are run")
    kind, made = PIPELINES[parts.kind], getattr(library("diffusers"), parts.kind)
    # what is wrong with the small parts is told before the large one is read
    given = {name: parts.read(name, (told,), dtype, device) for name, told in {**kind.encoders, "vae": kind.autoencoder}.items()}
    given |= {
        name.replace("text_encoder", "tokenizer"): parts.tokenizer(name.replace("text_encoder", "tokenizer")) for name in kind.encoders
    }
    scheduler = parts.settings("scheduler", "scheduler_config.json")
    model = load(folder, dtype, device)
    if model.config.channels != model.config.out_channels or (isinstance(model, DiT) and model.config.seen_width):
        raise ModelError(f"{folder}: its transformer begins with a picture; clips are made of a text alone")
    return Borrowed(model, made(**given, scheduler=None, transformer=None), kind, scheduler)


def _wan(pipe: Any, text: str, against: str, device: torch.device) -> tuple[Condition, Condition]:
    told, other = pipe.encode_prompt(text, against, True, max_sequence_length=512, device=device)
    return Condition(told), Condition(other)


def _ltx(pipe: Any, text: str, against: str, device: torch.device) -> tuple[Condition, Condition]:
    told, mask, other, others = pipe.encode_prompt(text, against, True, device=device)
    return Condition(told, mask.bool()), Condition(other, others.bool())


def _cogvideox(pipe: Any, text: str, against: str, device: torch.device) -> tuple[Condition, Condition]:
    told, other = pipe.encode_prompt(text, against, True, device=device)
    return Condition(told), Condition(other)


def _hunyuan(pipe: Any, text: str, against: str, device: torch.device) -> tuple[Condition, Condition]:
    told, pooled, mask = pipe.encode_prompt(text, device=device)
    condition = Condition(told, mask.bool(), pooled)
    return condition, condition


def _shifted(model: Model, fields: Fields, steps: int, shape: Shape) -> Schedule:
    return flow(steps, fields.real("flow_shift", fields.real("shift", 1.0)))


def _even(model: Model, fields: Fields, steps: int, shape: Shape) -> Schedule:
    return evenly(steps, fields.real("shift", 7.0))


def _by_length(model: Model, fields: Fields, steps: int, shape: Shape) -> Schedule:
    tokens = shape[2] * shape[3] * shape[4] // (model.config.patch[0] * model.config.patch[1] * model.config.patch[2])
    terminal = fields.real("shift_terminal") if fields.has("shift_terminal") else None
    return flow_by_length(steps, tokens, terminal)


def _preserving(model: Model, fields: Fields, steps: int, shape: Shape) -> Schedule:
    if not isinstance(model, SharedDiT):
        raise ModelError(f"{fields.where}: a {shown(type(model).__name__)} is no CogVideoX")
    return model.config.noise.flow(steps)


def _standard(pipe: Any, latents: Tensor) -> Tensor:
    """Latents by the mean and deviation of each channel."""
    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(latents) for values in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    out: Tensor = pipe.vae.decode(latents * deviation + mean, return_dict=False)[0]
    return out


def _timed(pipe: Any, latents: Tensor) -> Tensor:
    """Likewise, by an autoencoder that may be told how noisy they are: not at all."""
    mean, deviation = (part.view(1, -1, 1, 1, 1).to(latents) for part in (pipe.vae.latents_mean, pipe.vae.latents_std))
    time = torch.zeros(1).to(latents) if pipe.vae.config.timestep_conditioning else None
    out: Tensor = pipe.vae.decode(latents * deviation / pipe.vae.config.scaling_factor + mean, time, return_dict=False)[0]
    return out


def _scaled(pipe: Any, latents: Tensor) -> Tensor:
    """Latents by one factor."""
    out: Tensor = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
    return out


_T5 = {"text_encoder": "T5EncoderModel"}
PIPELINES: Mapping[str, _Kind] = {
    "WanPipeline": _Kind(
        "AutoencoderKLWan", {"text_encoder": "UMT5EncoderModel"}, Screen(81, 480, 832, 16.0), 5.0, _wan, _shifted, _standard
    ),
    "LTXPipeline": _Kind(
        "AutoencoderKLLTXVideo", _T5, Screen(161, 512, 704, 25.0), 3.0, _ltx, _by_length, _timed,
        ("vae_temporal_compression_ratio", "vae_spatial_compression_ratio"),
    ),
    "CogVideoXPipeline": _Kind("AutoencoderKLCogVideoX", _T5, Screen(49, 480, 720, 8.0), 6.0, _cogvideox, _preserving, _scaled),
    "HunyuanVideoPipeline": _Kind(
        "AutoencoderKLHunyuanVideo", {"text_encoder": "LlamaModel", "text_encoder_2": "CLIPTextModel"}, Screen(129, 720, 1280, 24.0), 6.0,
        _hunyuan, _even, _scaled, distilled=True,
    ),
}  # fmt: skip
"""Diffusers' pipelines that make clips of a text, by their classes."""
