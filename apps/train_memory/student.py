"""A policy small enough to train on two cores in minutes, of the same parts as a large one: eyes, decoder, refiner, expert."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.selection import BlockLayout, Selection
from mmsdk.vla.envs.belt import ACTION, CHUNK, HEIGHT, PERIOD, STATE, WIDTH
from mmsdk.vla.heads.expert import ExpertConfig
from mmsdk.vla.memory.dual import Ablation, MemoryConfig
from mmsdk.vla.memory.expert import DualConfig, DualExpert
from mmsdk.vla.memory.refine import Refiner, RefinerConfig

__all__ = ["Recipe", "Student"]

_PATCH = 4, 8
_VOCABULARY = 4
_WORDS = 2


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sizes and the training; two runs with the same recipe are the same run. Acting reads `ratio` of blocks, in `flow` steps."""

    condition: Ablation = "dual"
    width: int = 64
    layers: int = 3
    heads: int = 4
    steps: int = 2000
    rows: int = 64
    rate: float = 2e-3
    warmup: int = 50
    seed: int = 0
    ratio: float = 0.7
    flow: int = 10

    @property
    def memory(self) -> MemoryConfig:
        """The memory of this condition, as it acts; training reads complete blocks."""
        return MemoryConfig(float(PERIOD), selection=Selection(self.ratio)).ablated(self.condition)


class Eyes(nn.Module):
    """Patches of a picture as tokens: one linear map and a learnt place, then one layer of two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        count = (HEIGHT // _PATCH[0]) * (WIDTH // _PATCH[1])
        self.patch = nn.Conv2d(3, width, _PATCH, stride=_PATCH)
        self.place = nn.Parameter(torch.randn(count, width) * 0.02)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def see(self, pixels: Float[Tensor, "b c 3 h w"]) -> Float[Tensor, "b n d"]:
        """Visual tokens of c pictures, side by side."""
        patches = self.patch(pixels.flatten(0, 1)).flatten(2).transpose(1, 2) + self.place
        tokens = patches + self.mlp(patches)
        seen: Tensor = tokens.unflatten(0, pixels.shape[:2]).flatten(1, 2)
        return seen


class Student(nn.Module):
    """All parts, made anew from the recipe's seed."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        width, heads = recipe.width, recipe.heads
        sizes = heads, heads, width // heads
        torch.manual_seed(recipe.seed)
        self.eyes = Eyes(width)
        self.decoder = Decoder(DecoderConfig(_VOCABULARY, width, recipe.layers, *sizes, 2 * width, 1024, tied=True))
        nn.init.normal_(self.decoder.embedding.weight, std=0.5)
        patches = len(self.eyes.place)
        layout, sight = BlockLayout((patches,), _WORDS), RefinerConfig(width, width, 2, heads, 2 * width, 8)
        self.refiner = Refiner(self.decoder.config, layout, sight)
        expert = ExpertConfig(width, recipe.layers, *sizes, 2 * width)
        self.expert = DualExpert(DualConfig(expert, CHUNK, ACTION, STATE))
