"""A policy small enough to train on one core in minutes, of the same parts as a large one: eyes, decoder, refiner, expert.

What the eyes find in a picture are four visual tokens; behind them stand two words of instruction. Numbers go in and out in units of their
spread over the demonstrations.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mmsdk.apps.train_belt.eyes import MAPS, NUMBERS
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.selection import BlockLayout, Selection
from mmsdk.vla.envs.belt import CHUNK, PERIOD
from mmsdk.vla.envs.fetch_sizes import ACTION, STATE
from mmsdk.vla.heads.expert import ExpertConfig
from mmsdk.vla.memory.dual import Ablation, MemoryConfig
from mmsdk.vla.memory.expert import DualConfig, DualExpert
from mmsdk.vla.memory.refine import Refiner, RefinerConfig

__all__ = ["Recipe", "Student", "words"]

_VOCABULARY, _WORDS = 4, 2
_WAVES = (1.0, 2.0, 4.0, 8.0, 16.0)
_FINE = (1.0, 0.5, 1.0, 1.0)
"""Of an action's numbers, how much of their spread is a unit: along the belt a hand has to be right to a fifth of it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sizes and the training; two runs with the same recipe on the same demonstrations are the same run."""

    condition: Ablation = "dual"
    width: int = 64
    layers: int = 2
    heads: int = 4
    steps: int = 2000
    rows: int = 64
    rate: float = 3e-3
    warmup: int = 50
    seed: int = 0
    flow: int = 8

    @property
    def memory(self) -> MemoryConfig:
        """The memory of this condition. Four visual tokens a block leave nothing to choose from: all are read."""
        return MemoryConfig(float(PERIOD), selection=Selection(1.0)).ablated(self.condition)


class Places(nn.Module):
    """What the eyes found as tokens: places with their sines and cosines, a learnt vector for each kind of thing, two matrices."""

    waves: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kind = nn.Parameter(torch.randn(MAPS, width) * 0.5)
        self.first = nn.Linear(NUMBERS + 2 * len(_WAVES), width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.register_buffer("waves", torch.tensor(_WAVES), persistent=False)

    def forward(self, found: Float[Tensor, "*b k f"]) -> Float[Tensor, "*b k d"]:
        """One token for each map."""
        angle = found[..., :1] * self.waves
        tokens = self.first(torch.cat((found, angle.sin(), angle.cos()), dim=-1)) + self.kind
        out: Tensor = tokens + self.mlp(tokens)
        return out


class Student(nn.Module):
    """All parts, made anew from the recipe's seed. The spreads are told by `measure`, once, before training."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        width, heads = recipe.width, recipe.heads
        sizes = heads, heads, width // heads
        torch.manual_seed(recipe.seed)
        self.places = Places(width)
        self.decoder = Decoder(DecoderConfig(_VOCABULARY, width, recipe.layers, *sizes, 2 * width, 1024, tied=True))
        nn.init.normal_(self.decoder.embedding.weight, std=0.5)
        layout, sight = BlockLayout((MAPS,), _WORDS), RefinerConfig(width, width, 2, heads, 2 * width, 8)
        self.refiner = Refiner(self.decoder.config, layout, sight)
        self.expert = DualExpert(DualConfig(ExpertConfig(width, recipe.layers, *sizes, 2 * width), CHUNK, ACTION, STATE))
        for name, size in (("state", STATE), ("action", ACTION)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_spread", torch.ones(size))

    def measure(self, states: Float[Tensor, "n p"], actions: Float[Tensor, "n a"]) -> None:
        """Take means and spreads of demonstrations; what has to be precise is told in smaller units."""
        for name, values in (("state", states), ("action", actions)):
            self.get_buffer(f"{name}_mean").copy_(values.mean(0))
            self.get_buffer(f"{name}_spread").copy_(values.std(0).clamp_min(1e-3))
        self.get_buffer("action_spread").mul_(torch.tensor(_FINE))

    def felt(self, states: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        """States in units of their spread."""
        return (states - self.get_buffer("state_mean")) / self.get_buffer("state_spread")

    def wanted(self, actions: Float[Tensor, "*b a"]) -> Float[Tensor, "*b a"]:
        """Actions in units of their spread."""
        return (actions - self.get_buffer("action_mean")) / self.get_buffer("action_spread")

    def commands(self, actions: Float[Tensor, "*b a"]) -> Float[Tensor, "*b a"]:
        """And back."""
        return actions * self.get_buffer("action_spread") + self.get_buffer("action_mean")


def words(cued: Bool[Tensor, " n"]) -> tuple[Int[Tensor, "n w"], Bool[Tensor, "n w"]]:
    """The instruction: "pick it" or "pick the one that was shown", two tokens each."""
    ids = torch.stack((torch.ones_like(cued, dtype=torch.long), 2 + cued.long()), dim=1)
    return ids, torch.ones_like(ids, dtype=torch.bool)
