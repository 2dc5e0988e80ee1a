"""The training loop: a batch of episodes, an update of actor and critic, a step of the closed loop; resumable exactly, Ctrl-C saves."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm

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
    """What is learned: actor, critic, their optimiser, and lambda."""

    actor: Actor
    critic: Critic
    optimiser: torch.optim.Optimizer
    loop: Loop

    @staticmethod
    def of(actor: Actor, inputs: int, loop: Loop, recipe: Recipe) -> "Learner":
        torch.manual_seed(recipe.seed)
        critic = Critic(inputs)
        ranks = actor.ranking()
        others = [p for p in actor.parameters() if all(p is not rank for rank in ranks)]
        groups = [
            {"params": others, "lr": recipe.lr}, {"params": ranks, "lr": recipe.rank_lr},
            {"params": list(critic.parameters()), "lr": recipe.critic_lr},
        ]  # fmt: skip
        return Learner(actor, critic, torch.optim.Adam(groups), loop)

    def save(self, folder: Path, update: int) -> None:
        """Everything a resumed run needs, written whole or not at all."""
        tensors = {f"actor.{k}": v for k, v in self.actor.state_dict().items()}
        tensors |= {f"critic.{k}": v for k, v in self.critic.state_dict().items()}
        for index, state in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{index}.{k}": v for k, v in state.items()}
        facts = {"update": str(update), "price": repr(self.loop.price), "drop": repr(self.loop.drop)}
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "checkpoint.part", metadata=facts)
        os.replace(folder / "checkpoint.part", folder / CHECKPOINT)

    def resume(self, folder: Path) -> int:
        """Load the checkpoint, if there is one; returns the update to go on with."""
        path = folder / CHECKPOINT
        if not path.exists():
            return 0
        tensors = load_file(path)
        for name, module in (("actor", self.actor), ("critic", self.critic)):
            module.load_state_dict({k.removeprefix(f"{name}."): v for k, v in tensors.items() if k.startswith(f"{name}.")})
        state = self.optimiser.state_dict()
        state["state"] = {}
        for key, value in tensors.items():
            if key.startswith("optimiser."):
                _, index, name = key.split(".")
                state["state"].setdefault(int(index), {})[name] = value
        self.optimiser.load_state_dict(state)
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
        self.loop = Loop(self.loop.target, float(facts["price"]), float(facts["drop"]))
        return int(facts["update"])


def train(world: World, actor: Actor, recipe: Recipe, folder: Path, stop_after: int | None = None) -> tuple[int, Loop]:
    """Train the actor in place from the last checkpoint in `folder` to the end, or `stop_after` updates; Ctrl-C saves before it leaves.

    Gives the updates that the actor has had, and the closed loop as it stands. Raises InputError where there are fewer pictures than one
    update takes.
    """
    if len(world.pool) < recipe.rows:
        raise InputError(f"{recipe.rows} pictures make an update, and the pool has {len(world.pool)}", item=str(folder))
    inputs = 2 * actor.config.width + 2 + 2 * world.pool.labels.shape[1] + 3
    learner = Learner.of(actor, inputs, Loop(actor.config.drop), recipe)
    first = learner.resume(folder)
    stopping, done = _Stop(), first
    with tqdm(range(first, recipe.updates), initial=first, total=recipe.updates, desc="training", unit="update", mininterval=10) as bar:
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
    stopping.restore()
    return done, learner.loop


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
    save_file({k: v.detach().half().contiguous() for k, v in actor.state_dict().items()}, path.with_suffix(".part"), metadata=facts)
    os.replace(path.with_suffix(".part"), path)


class _Stop:
    """Turns the first Ctrl-C into a wish to stop after this update."""

    def __init__(self) -> None:
        self.asked = False
        self._before = signal.signal(signal.SIGINT, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True
        self.restore()

    def restore(self) -> None:
        signal.signal(signal.SIGINT, self._before)
