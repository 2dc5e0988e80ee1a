"""How the policy learns: first to see where things are, then to act, by flow matching with what was said about where things are beside it.

Each step is a pure function of the recipe's seed and its number, so that a run in pieces is the run in one. What ships is a running mean of
the weights. Half of the rows learn with the first d actions of the chunk given at clean time (training-time real-time chunking, arXiv
2512.05964), so that the network knows what a hard prefix means; one in twenty sees black pictures, so that it knows what blindness means.
"""

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.apps import kept
from mmsdk.apps.descent import cosine
from mmsdk.apps.train_robot.lessons import Lessons, Phrases, normalizers, where_of
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.slots import positions_of
from mmsdk.stages import Context
from mmsdk.vla.heads.branch import Branch
from mmsdk.vla.heads.flow import flow_loss, sample_times
from mmsdk.vla.heads.glance import Glance, Gleaned
from mmsdk.vla.heads.pi0 import Pi0
from mmsdk.vla.statistics import Statistics

__all__ = ["Class", "Learner", "Recipe", "errors", "learn"]

_SPREAD = 1_000_003


@dataclass(frozen=True, slots=True)
class Recipe:
    """The constants of training. `seeing` of the `steps` learn to see alone; `draws` noises and times are drawn for each row of a batch."""

    steps: int = 5_000
    seeing: int = 1_000
    rows: int = 64
    draws: int = 2
    rate: float = 1e-3
    warmup: int = 200
    decay: float = 0.01
    mean: float = 0.999
    where: float = 1.0
    dark: float = 0.05
    prefix: int = 9
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Class:
    """What stays as it is: the lessons, what is said, where tokens stand, what black pictures look like, the statistics."""

    lessons: Lessons
    phrases: Phrases
    standing: Float[Tensor, "m p"]
    black: Float[Tensor, "m k"]
    statistics: dict[str, Statistics]

    def glanced(self, glance: Glance, rows: Int[Tensor, " b"], ways: Int[Tensor, " b"], dark: Bool[Tensor, " b"]) -> Gleaned:
        """What is made of these looks, each told in one of its ways, the dark ones black."""
        tokens = torch.where(dark[:, None, None], self.black, self.lessons.features[rows].float())
        shown = torch.ones(tokens.shape[:2], dtype=torch.bool)
        tasks = self.lessons.tasks[rows]
        words, said = self.phrases.words[tasks, ways], self.phrases.said[tasks, ways]
        gleaned: Gleaned = glance(tokens, self.standing.expand(len(rows), -1, -1), shown, words, said)
        return gleaned


@dataclass(slots=True)
class Learner:
    """What is learned, the running mean of it, and the optimiser."""

    glance: Glance
    network: Pi0
    mean: tuple[Glance, Pi0]
    optimiser: torch.optim.Optimizer

    @staticmethod
    def of(glance: Glance, network: Pi0, recipe: Recipe) -> "Learner":
        """At the beginning."""
        mean = Glance(glance.config).requires_grad_(False), Pi0(network.config).requires_grad_(False)
        nn.ModuleList(mean).load_state_dict(nn.ModuleList((glance, network)).state_dict())
        parts = [*glance.parameters(), *network.parameters()]
        grouped: list[dict[str, Any]] = [
            {"params": [p for p in parts if p.ndim > 1]},
            {"params": [p for p in parts if p.ndim < 2], "weight_decay": 0.0},
        ]
        return Learner(glance, network, mean, torch.optim.AdamW(grouped, recipe.rate, betas=(0.9, 0.98), weight_decay=recipe.decay))

    @property
    def both(self) -> nn.ModuleList:
        """What is learned."""
        return nn.ModuleList((self.glance, self.network))

    def step(self, loss: Tensor, rate: float, mean: float) -> None:
        """One step down the loss; the mean follows."""
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.both.parameters(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        with torch.no_grad():
            for slow, fast in zip(nn.ModuleList(self.mean).parameters(), self.both.parameters(), strict=True):
                slow.lerp_(fast, 1 - mean)

    def save(self, path: Path, step: int, recipe: Recipe) -> None:
        """Everything that going on needs, written whole or not at all."""
        parts = {"both": self.both.state_dict(), "mean": nn.ModuleList(self.mean).state_dict()}
        kept.save(path, parts, self.optimiser, {"step": str(step), "recipe": repr(recipe)})

    def resume(self, path: Path, recipe: Recipe) -> int:
        """Load the checkpoint, if there is one; the step to go on with. Raises InputError where it is of another recipe."""
        if not path.exists():
            return 0
        parts, facts = kept.resume(path, self.optimiser, repr(recipe))
        self.both.load_state_dict(parts["both"])
        nn.ModuleList(self.mean).load_state_dict(parts["mean"])
        return int(facts["step"])


def learn(
    room: Class, learner: Learner, recipe: Recipe, path: Path, every: int = 250
) -> Generator[tuple[int, dict[str, float]], None, None]:
    """Train from the last checkpoint to the end, telling (steps done, losses) after each; a checkpoint is kept every so many steps.

    Closing the iterator keeps what was learned so far.
    """
    own = (~room.lessons.held).nonzero()[:, 0]
    for step in range(learner.resume(path, recipe), recipe.steps):
        generator = torch.Generator().manual_seed(recipe.seed * _SPREAD + step)
        rows = own[torch.randint(len(own), (recipe.rows,), generator=generator)]
        losses = _losses(room, learner, recipe, rows, generator, acts=step >= recipe.seeing)
        rate = cosine(step, recipe.steps, recipe.rate, recipe.warmup, least=0.02)
        learner.step(recipe.where * losses["where"] + losses["act"], rate, min(recipe.mean, (step + 1) / (step + 10)))
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            learner.save(path, step + 1, recipe)
        try:
            yield step + 1, {name: float(loss.detach()) for name, loss in losses.items()}
        except GeneratorExit:
            learner.save(path, step + 1, recipe)
            raise


def _losses(
    room: Class, learner: Learner, recipe: Recipe, rows: Int[Tensor, " b"], generator: torch.Generator, acts: bool
) -> dict[str, Tensor]:
    lessons, b = room.lessons, len(rows)
    ways = torch.randint(room.phrases.said.shape[1], (b,), generator=generator)
    dark = torch.rand(b, generator=generator) < recipe.dark
    gleaned = room.glanced(learner.glance, rows, ways, dark)
    apart = F.smooth_l1_loss(gleaned.where, where_of(lessons.places[rows], lessons.states[rows]), reduction="none", beta=0.1).mean(1)
    losses = {"where": apart[~dark].mean(), "act": torch.zeros(())}
    if acts:
        again = torch.arange(b).repeat(recipe.draws)
        losses["act"] = _flow(room, learner, recipe, gleaned, rows, again, generator)
    return losses


def _flow(
    room: Class, learner: Learner, recipe: Recipe, gleaned: Gleaned, rows: Tensor, again: Tensor, generator: torch.Generator
) -> Float[Tensor, ""]:
    """The flow loss of these rows, each as often as `again` names it, behind one prefix."""
    state, action = normalizers(room.statistics)
    decoder = learner.glance.decoder
    sizes = decoder.config.layers, len(rows), decoder.config.kv_heads, decoder.config.head_dim, 1
    known = Branch(DenseCache.allocate(*sizes, torch.float32, "cpu"), decoder.config.layers)
    valid = torch.ones(gleaned.embeddings.shape[:2], dtype=torch.bool)
    # both ways, as `mmsdk.vla.heads.prefix.prefill_blocks` does without gradients
    hidden = decoder(
        gleaned.embeddings, positions_of(valid), known, torch.ones_like(valid)[:, None, None].expand(-1, 1, valid.shape[1], -1)
    )
    context = Context(hidden[again, -1], known.select(again))
    rows = rows[again]
    chunks, valid = action(room.lessons.chunks[rows]), room.lessons.valid[rows]
    noise = torch.randn(chunks.shape, generator=generator)
    t = sample_times(len(rows), generator).expand(-1, chunks.shape[1])
    given = torch.randint(recipe.prefix + 1, (len(rows),), generator=generator) * (torch.rand(len(rows), generator=generator) < 0.5)
    certain = torch.arange(chunks.shape[1]) < given[:, None]
    velocity = learner.network.velocity(context, state(room.lessons.states[rows]))
    return flow_loss(velocity, chunks, noise, torch.where(certain, 0.0, t), valid & ~certain)


@torch.no_grad()
def errors(room: Class, glance: Glance, batch: int = 256) -> list[dict[str, int | float]]:
    """How far off things are seen in the demonstrations that are only measured on, in centimetres: of each task the medians."""
    found = list[dict[str, int | float]]()
    for task in range(int(room.lessons.tasks.max()) + 1):
        rows = (room.lessons.held & (room.lessons.tasks == task)).nonzero()[:, 0]
        parts = [
            room.glanced(glance, some, torch.zeros_like(some), torch.zeros_like(some, dtype=torch.bool)).where for some in rows.split(batch)
        ]
        truth = where_of(room.lessons.places[rows], room.lessons.states[rows])
        apart = 10 * (torch.cat(parts) - truth).unflatten(1, (4, 3)).norm(dim=2).median(0).values
        names = ("thing", "goal", "thing from the hand", "goal from the hand")
        found.append({"task": task, **{name: round(float(each), 2) for name, each in zip(names, apart, strict=True)}})
    return found
