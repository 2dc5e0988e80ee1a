"""The training loop: a batch of episodes, an update of actor and critic, a step of the closed loop; resumable exactly, Ctrl-C saves."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from mmsdk.apps import kept
from mmsdk.apps.interrupts import Stop
from mmsdk.apps.train_dora.episodes import Episodes, play, sampled
from mmsdk.apps.train_dora.learn import Critic, Loop, Recipe, improve, privileged, rewards
from mmsdk.apps.train_dora.pictures import Probe, recall
from mmsdk.apps.train_dora.pool import Pool
from mmsdk.errors import InputError
from mmsdk.tokencomp.actor import Actor
from mmsdk.vision.vit import ViT

__all__ = ["CHECKPOINT", "World", "export", "train"]

CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True, slots=True)
class World:
    """What stays as it is: the transformer, the probe and the pool of pictures."""

    vit: ViT
    probe: Probe
    pool: Pool

    def episodes(self, actor: Actor, numbers: list[int], least: int, generator: torch.Generator) -> Episodes:
        """Play these pictures."""
        return play(self.vit, self.probe, actor.config.blocks, sampled(actor, least, generator), self.pool.only(numbers))


@dataclass(slots=True)
class Learner:
    """What is learned: actor, critic, their optimiser, and lambda. `settings` are what they are learned with."""

    actor: Actor
    critic: Critic
    optimiser: torch.optim.Optimizer
    loop: Loop
    settings: dict[str, str]

    @staticmethod
    def of(world: World, actor: Actor, recipe: Recipe) -> "Learner":
        torch.manual_seed(recipe.seed)
        critic = Critic(2 * actor.config.width + 2 + 2 * world.pool.labels.shape[1] + 3)
        ranks = actor.ranking()
        others = [p for p in actor.parameters() if all(p is not rank for rank in ranks)]
        groups = [
            {"params": others, "lr": recipe.lr}, {"params": ranks, "lr": recipe.rank_lr},
            {"params": list(critic.parameters()), "lr": recipe.critic_lr},
        ]  # fmt: skip
        return Learner(actor, critic, torch.optim.Adam(groups), Loop(actor.config.drop), _settings(world, actor, recipe))

    def save(self, folder: Path, update: int) -> None:
        """Everything a resumed run needs, written whole or not at all."""
        parts = {"actor": self.actor.state_dict(), "critic": self.critic.state_dict()}
        facts = {"update": str(update), "price": repr(self.loop.price), "drop": repr(self.loop.drop), "settings": json.dumps(self.settings)}
        kept.save(folder / CHECKPOINT, parts, self.optimiser, facts)

    def resume(self, folder: Path) -> int:
        """Load the checkpoint, if there is one; returns the update to go on with.

        Raises InputError where it was made with other settings.
        """
        path = folder / CHECKPOINT
        if not path.exists():
            return 0
        parts, facts = kept.resume(path, self.optimiser)
        made = json.loads(facts["settings"])
        for name, value in self.settings.items():
            if made.get(name) != value:
                told = f"it was made with {name} {made.get(name)}, and this is {value}"
                raise InputError(f"{told}; give what it was made with, or name another folder", item=str(path))
        self.actor.load_state_dict(parts["actor"])
        self.critic.load_state_dict(parts["critic"])
        self.loop = Loop(self.loop.target, float(facts["price"]), float(facts["drop"]))
        return int(facts["update"])


def train(world: World, actor: Actor, recipe: Recipe, folder: Path, stop_after: int | None = None) -> tuple[int, Loop]:
    """Train the actor in place from the last checkpoint in `folder` to the end, or `stop_after` updates; Ctrl-C saves before it leaves.

    Gives the updates that the actor has had, and the closed loop as it stands. Raises InputError where there are fewer pictures than one
    update takes, and where the checkpoint was made with other settings; only `updates` may be others, for a run may go on longer.
    """
    if len(world.pool) < recipe.rows:
        raise InputError(f"{recipe.rows} pictures make an update, and the pool has {len(world.pool)}", item=str(folder))
    learner = Learner.of(world, actor, recipe)
    first = learner.resume(folder)
    done = first
    bar = tqdm(range(first, recipe.updates), initial=first, total=recipe.updates, desc="training", unit="update", mininterval=10)
    with bar, Stop() as stopping:
        for update in bar:
            told, done = _update(world, learner, recipe, update), update + 1
            bar.set_postfix({k: f"{told[k]:.3g}" for k in ("saved", "drop", "price")}, refresh=False)
            last = done == recipe.updates or stopping.asked or (stop_after is not None and done - first >= stop_after)
            with (folder / "log.jsonl").open("a") as log:
                log.write(json.dumps({"update": done, **{k: round(v, 4) for k, v in told.items()}}) + "\n")
            if last or done % 10 == 0:
                learner.save(folder, done)
            if last:
                break
    return done, learner.loop


def _settings(world: World, actor: Actor, recipe: Recipe) -> dict[str, str]:
    """All that a run hangs on but how long it is."""
    given = {"pictures": len(world.pool), "dtype": next(world.vit.parameters()).dtype}
    told = asdict(recipe) | {f"actor's {name}": value for name, value in asdict(actor.config).items()} | given
    return {name: str(value) for name, value in told.items() if name != "updates"}


def _update(world: World, learner: Learner, recipe: Recipe, update: int) -> dict[str, float]:
    """One batch: which pictures and what is drawn is a pure function of the seed and the update."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + update)
    numbers: list[int] = torch.randperm(len(world.pool), generator=generator)[: recipe.rows].tolist()
    episodes = world.episodes(learner.actor, numbers, recipe.least, generator)
    pool, price = world.pool.only(numbers), learner.loop.price
    lost = 100 * (recall(pool.dense, pool.labels) - recall(episodes.final, pool.labels)).mean()
    inputs = privileged(episodes, pool.cls, pool.labels, price)
    told = improve(learner.actor, learner.critic, learner.optimiser, episodes, inputs, rewards(episodes, price), recipe)
    learner.loop = learner.loop.after(float(lost))
    saved, fidelity = float(episodes.saved.sum(dim=1).mean()), float(episodes.fidelity[:, -1].mean())
    return {"saved": saved, "fidelity": fidelity, "lost": float(lost), "drop": learner.loop.drop, "price": learner.loop.price, **told}


def export(path: Path, actor: Actor, made: str) -> None:
    """Write the actor that ships, 16-bit, whole or not at all; `made` says what it was trained on."""
    config = actor.config
    facts = {"width": str(config.width), "depth": str(config.depth), "hidden": str(config.hidden), "drop": repr(config.drop)}
    facts |= {"blocks": ",".join(map(str, config.blocks)), "made": made}
    kept.write(path, {name: tensor.half() for name, tensor in actor.state_dict().items()}, facts)
