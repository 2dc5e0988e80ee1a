"""How the model learns: flow matching on drawn clips, small ones first, and words dropped now and then for guidance.

A coarse clip is the fine one from afar, with the same patch of pixels for a token and the same places: what happens is learned where a clip
has 256 tokens, edges where it has 4,096, or, for a quarter of the attention, in a quarter of its frames. Every step is a pure function of
the seed and its number.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmsdk.apps.train_video.plain import Plain
from mmsdk.apps.train_video.world import FRAMES, SIDE, VOCABULARY, drawn, film
from mmsdk.diffusion.dit import DiT, DiTConfig
from mmsdk.diffusion.rotary import Spread, Waves
from mmsdk.diffusion.words import Words

__all__ = ["CLEANEST", "CONFIG", "STAGES", "Recipe", "Stage", "begun", "loss_of", "memory", "rate", "spoken", "stage_of"]

_PATCH = 4
_SPREAD = Spread(SIDE // _PATCH)
CONFIG = DiTConfig(
    channels=3,
    out_channels=3,
    heads=3,
    head_dim=64,
    hidden=768,
    layers=6,
    text_width=64,
    rotary=_SPREAD,
    patch=(1, _PATCH, _PATCH),
    frequencies=128,
    order="channels_first",
    standing=Waves(_SPREAD),
    predicts="clip",
)
_WORDS_MOST = 12
CLEANEST = 0.05


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps at one size of clips, `rows` of them at a time.

    `coarser` is the share of steps at half the side, `brief` that of steps with a quarter of the frames, wherever in the clip they begin;
    both with 4 times the rows, so that all steps have as many tokens.
    """

    side: int
    steps: int
    rows: int
    rate: float
    coarser: float = 0.0
    brief: float = 0.0


STAGES = (Stage(16, 4000, 8, 1e-3), Stage(32, 2500, 3, 7e-4), Stage(64, 800, 1, 4e-4, 0.25, 0.5))


@dataclass(frozen=True, slots=True)
class Recipe:
    """The stages, the share of texts that are dropped, the shift at the full size, the longest memory of the average, and the seed."""

    stages: tuple[Stage, ...] = STAGES
    dropped: float = 0.1
    shift: float = 8.0
    memory: float = 0.998
    warmup: int = 100
    seed: int = 0

    @property
    def steps(self) -> int:
        """Of all stages."""
        return sum(stage.steps for stage in self.stages)


def begun(config: DiTConfig, seed: int) -> tuple[DiT, Words]:
    """A model that does nothing yet: every layer hands its tokens on (adaLN-Zero, arXiv 2212.09748), and the clip is grey."""
    torch.manual_seed(seed)
    model, words = DiT(config), Words(VOCABULARY, config.text_width, _WORDS_MOST)
    for name, parameter in model.named_parameters():
        if name.startswith(("time_out.", "out.")) or name.endswith(("modulation", "cross.out.weight", "cross.out.bias")):
            nn.init.zeros_(parameter)
    nn.init.normal_(words.places, std=0.5)
    return model, words


def stage_of(recipe: Recipe, step: int) -> tuple[Stage, int]:
    """The stage that a step belongs to, and its number there."""
    for stage in recipe.stages:
        if step < stage.steps:
            return stage, step
        step -= stage.steps
    raise AssertionError(f"{step} steps beyond the last one")


def rate(recipe: Recipe, step: int) -> float:
    """Level within a stage but for a rise at its beginning, and, in the last one, a fall to a tenth over its second half."""
    stage, number = stage_of(recipe, step)
    rise = min(1.0, (number + 1) / min(recipe.warmup, stage.steps))
    fall = 1.0 if stage is not recipe.stages[-1] else min(1.0, 0.1 + 1.8 * (1 - number / stage.steps))
    return stage.rate * rise * fall


def memory(recipe: Recipe, step: int) -> float:
    """How much of the averaged weights a step leaves: the average of a stage begins with it, and goes back over a tenth of its steps."""
    _, number = stage_of(recipe, step)
    return min(recipe.memory, (1 + number) / (10 + number))


def loss_of(model: DiT, words: Words, recipe: Recipe, step: int, dtype: torch.dtype) -> Float[Tensor, ""]:
    """The error of the velocity of one step's clips, at sigmas that lie where the schedule's steps do.

    It is weighted by sigma: what is nearly clean is easy, and no step begins there.
    """
    generator = torch.Generator().manual_seed(1_000_003 * recipe.seed + step)
    stage, _ = stage_of(recipe, step)
    side, frames, rows = _size(stage, float(torch.rand((), generator=generator)))
    stories = drawn(rows, generator)
    clips = film(stories, side, generator)
    first = 0 if frames == FRAMES else int(torch.randint(0, FRAMES - frames + 1, (), generator=generator))
    clips = clips[:, :, first : first + frames]
    noise, even = torch.randn(clips.shape, generator=generator), torch.rand(rows, generator=generator)
    # the shift goes with the square root of the tokens, and so with the side
    shift = recipe.shift * side / SIDE * math.sqrt(frames / FRAMES)
    sigma = CLEANEST + (1 - CLEANEST) * shift * even / (1 + (shift - 1) * even)
    mixed = torch.lerp(clips, noise, sigma.view(-1, 1, 1, 1, 1))
    numbers = words.numbers(spoken(stories.captions(), recipe.dropped, generator))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        velocity = model(mixed, 1000 * sigma, words(numbers), Plain(), first=first)
    error = (velocity.float() - (noise - clips)).square().mean((1, 2, 3, 4))
    loss: Tensor = (sigma * error).mean()
    return loss


def _size(stage: Stage, draw: float) -> tuple[int, int, int]:
    """Side, frames and rows of a step's clips."""
    if draw < stage.coarser:
        return stage.side // 2, FRAMES, 4 * stage.rows
    if draw < stage.coarser + stage.brief:
        return stage.side, FRAMES // 4, 4 * stage.rows
    return stage.side, FRAMES, stage.rows


def spoken(captions: Sequence[str], dropped: float, generator: torch.Generator) -> list[str]:
    """The captions, a share of them dropped."""
    silent = torch.rand(len(captions), generator=generator) < dropped
    return ["" if quiet else text for text, quiet in zip(captions, silent.tolist(), strict=True)]
