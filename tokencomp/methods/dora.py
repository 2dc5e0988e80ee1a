"""DORA: an actor removes tokens inside a frozen vision transformer, of each picture as many as it finds right.

Published, in an abstract (Dynamic Online Reinforcement Agent): at every eligible block a hierarchical actor decides whether to prune, how
many tokens, and which, from the picture's current representation; it is trained as a finite-horizon Markov decision process (see
`mmsdk.apps.train_dora`); what is deployed is the frozen backbone and a light actor, with hard deletion and packed attention over rows of
different lengths. A paper of the same name on merging (arXiv 2605.11683) is another variant and not this one.

Everything else is our reconstruction: what the actor sees and how it is built (`mmsdk.tokencomp.actor`), the eligible blocks (before the
fourth and the seventh for the actor that ships, since on a processor a look takes half as long as a block), the fractions, the greedy rule
(prune where the probability is above one half, the most probable fraction, the tokens of the lowest logits), and the training. The paper's
figures are not ours.

The actor that ships was trained for less than the program does if it is not told otherwise: with seed 0 on 320 pictures, 42 updates of 24
episodes, aiming at a point of accuracy (`--pool 320 --updates 42 --rows 24`; the file says so of itself, under `made`).

A budget: `dora` alone is adaptive. How many tokens of a picture are left is the actor's answer and differs from picture to picture; each
frame of a clip ends with no more than its part of what a clip has in full (64 of 256 where clips are pooled by two). `dora:64` and
`dora:0.5` are met exactly, as by every other method: the actor says when and which, never goes below, and the last eligible block takes
what is still too much. Scores in the audit are the share of the blocks that ran with a patch: 1 for what is left.
"""

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

import safetensors
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.tokencomp.actor import Actor, ActorConfig, Brief, removals, staying
from mmsdk.vision.prune import Agent, View

__all__ = ["DORA"]

SHIPPED = "dinov2_small"


@dataclass(frozen=True, slots=True)
class DORA:
    """A `Pruner`. `actor` is "dinov2_small", which ships, or a file that training wrote.

    `least` patch tokens of a row are left whatever the actor thinks, where no budget asks for fewer.
    """

    actor: str = SHIPPED
    least: int = 8

    def __post_init__(self) -> None:
        if self.least < 1:
            raise ModelError(f"dora leaves at least one token of a picture, not {self.least}")

    def agent(self, stream: Float[Tensor, "b n d"], depth: int, first: int, most: int, exact: bool) -> Agent:
        """The greedy agent. Raises ModelError where the file is no actor, or one for another transformer."""
        actor = _read(self.actor, stream.device)
        config = actor.config
        if (config.width, config.depth, 1) != (stream.shape[2], depth, first):
            raise ModelError(
                f"the actor {self.actor!r} of dora was trained for vision transformers {config.width} wide of {config.depth} blocks with a "
                f"class token; this one is {stream.shape[2]} wide, of {depth} blocks and {first} class tokens. Train one for it "
                "(python -m mmsdk.apps.train_dora) or choose another method"
            )
        return Greedy(actor, most if exact else min(self.least, most), most)


@dataclass(frozen=True, slots=True)
class Greedy:
    """The deployed actor: never below `least` patch tokens of a row, in the end never above `most`."""

    actor: Actor
    least: int
    most: int

    @property
    def blocks(self) -> tuple[int, ...]:
        """The actor's."""
        return self.actor.config.blocks

    @torch.no_grad()
    def __call__(self, view: View) -> Bool[Tensor, " s"]:
        """Whether, how many, which; the which is ranked only in rows that prune."""
        brief = Brief.of(view)
        gate, count, context = self.actor(brief)
        remove = self.removed(view, gate, count)
        prunes = remove > 0
        stays = torch.ones(len(view.stream), dtype=torch.bool, device=gate.device)
        if bool(prunes.any()):
            asked = brief.only(prunes)
            keep = self.actor.which(asked, context[prunes])
            stays[prunes[view.rows.row]] = staying(keep, remove[prunes], asked.rows)
        return stays

    def removed(self, view: View, gate: Float[Tensor, " b"], count: Float[Tensor, "b f"]) -> Tensor:
        """How many go of each row; at the last eligible block at least what is above `most`."""
        patches = torch.tensor(view.rows.lengths, device=gate.device) - view.rows.first
        remove = removals(count.argmax(dim=1), patches, self.least).masked_fill(gate <= 0, 0)
        return torch.maximum(remove, patches - self.most) if view.block == self.blocks[-1] else remove


@lru_cache(maxsize=4)
def _read(actor: str, device: torch.device) -> Actor:
    path = Path(str(resources.files("mmsdk.tokencomp.methods") / f"dora_{actor}.safetensors")) if actor == SHIPPED else Path(actor)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no mapping
            facts = file.metadata() or {}
        eligible = tuple(int(block) for block in facts["blocks"].split(","))
        config = ActorConfig(int(facts["width"]), int(facts["depth"]), int(facts["hidden"]), float(facts["drop"]), eligible)
        return Actor.read(config, tensors).to(device)
    except (OSError, KeyError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as an actor of dora: {error}") from error
