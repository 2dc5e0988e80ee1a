"""What a pruned transformer is worth on held-out pictures: the probe's accuracy, operations by actual lengths, and pictures a second.

Beside the actor stand the whole transformer and random pruning, which removes as many tokens of each picture at each block as the actor
does, and so costs the same operations, but draws which.
"""

import statistics
import time
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from mmsdk.apps.console import Cell
from mmsdk.apps.train_dora.episodes import block_flops
from mmsdk.apps.train_dora.pictures import Drawn, Probe, divergence, judged, recall
from mmsdk.tokencomp.actor import Actor, Brief, staying
from mmsdk.tokencomp.methods.dora import DORA, Greedy
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.prune import Agent, Pruner, Pruning, View
from mmsdk.vision.shorten import WHOLE, Groups, Shortening
from mmsdk.vision.vit import ViT, ViTConfig

__all__ = ["Chance", "row_flops", "score", "speed"]


@dataclass(frozen=True, slots=True)
class Chance:
    """A `Pruner`: whether and how many by the actor, which by chance."""

    inner: DORA
    generator: torch.Generator

    def agent(self, stream: Float[Tensor, "b n d"], depth: int, first: int, most: int, exact: bool) -> Agent:
        """The actor's, its choice of tokens exchanged."""
        greedy = self.inner.agent(stream, depth, first, most, exact)
        assert isinstance(greedy, Greedy)
        return _Blind(greedy, self.generator)


@dataclass(frozen=True, slots=True)
class _Blind:
    greedy: Greedy
    generator: torch.Generator

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.greedy.blocks

    def __call__(self, view: View) -> Bool[Tensor, " s"]:
        gate, count, _ = self.greedy.actor(Brief.of(view))
        return staying(torch.rand(len(view.stream), generator=self.generator), self.greedy.removed(view, gate, count), view.rows)


@torch.no_grad()
def score(
    vit: ViT, probe: Probe, drawn: Drawn, count: int, by: DORA, shares: tuple[float, ...] = (0.5, 0.25), batch: int = 8
) -> list[dict[str, Cell]]:
    """Rows {method, budget, n, accuracy, accuracy_full, kl, kept, flops}: `kept` of 1 is all patch tokens, `flops` of 1 the whole's.

    Operations are those of the blocks and of the patches' embedding, and the actor's.
    """
    plans: list[tuple[str, str, Pruner | None, float]] = [("whole", "-", None, 1.0)]
    for share in (1.0, *shares):
        chance = Chance(by, torch.Generator().manual_seed(0))
        budget = "adaptive" if share == 1.0 else str(share)
        plans += [("dora", budget, by, share), ("random", budget, chance, share)]
    found: dict[int, list[Tensor]] = {number: [] for number in range(len(plans))}
    for start in tqdm(range(0, count, batch), desc="scoring", unit="batch", mininterval=5):
        pixels, labels = drawn(range(start, min(count, start + batch)))
        x = Preprocess()(pixels).to(vit.position.dtype)
        dense = judged(probe, vit(x))
        for number, (_, budget, pruner, share) in enumerate(plans):
            found[number].append(_judged(vit, probe, x, dense, labels, _pruning(pruner, share, budget, x, vit)))
    full = float(torch.cat(found[0])[:, 0].mean())
    rows: list[dict[str, Cell]] = []
    for number, (method, budget, _, _) in enumerate(plans):
        accuracy, kl, kept, cost = torch.cat(found[number]).mean(dim=0).tolist()
        rows.append(
            {
                "method": method,
                "budget": budget,
                "n": count,
                "accuracy": accuracy,
                "accuracy_full": full,
                "kl": kl,
                "kept": kept,
                "flops": cost,
            }
        )
    return rows


def _pruning(pruner: Pruner | None, share: float, budget: str, x: Tensor, vit: ViT) -> Shortening | Pruning:
    patches = x.shape[2] * x.shape[3] // vit.config.patch**2
    return WHOLE if pruner is None else Pruning(pruner, round(share * patches), budget != "adaptive")


def _judged(vit: ViT, probe: Probe, x: Tensor, dense: Tensor, labels: Tensor, shortening: Shortening | Pruning) -> Float[Tensor, "b 4"]:
    out = vit(x, shortening=shortening)
    logits = judged(probe, out)
    kept = torch.tensor(out.groups.lengths) / out.groups.owner.shape[1]
    actor = shortening.by.agent(out.tokens, vit.config.layers, 1, 1, False) if isinstance(shortening, Pruning) else None
    greedy = actor.greedy if isinstance(actor, _Blind) else actor
    cost = row_flops(vit.config, out.groups, greedy.actor if isinstance(greedy, Greedy) else None)
    return torch.stack((recall(logits, labels), divergence(dense, logits), kept, cost), dim=1)


def row_flops(config: ViTConfig, groups: Groups, actor: Actor | None) -> Float[Tensor, " b"]:
    """Operations of each row as a share of the whole transformer's, by the length of the row in each block; with the actor's looks."""
    n, first = groups.owner.shape[1], groups.first
    everywhere = torch.ones_like(groups.owner, dtype=torch.float32) if groups.ran is None else groups.ran
    ran = (everywhere * config.layers).round()
    lengths = first + (ran[:, :, None] > torch.arange(config.layers)).sum(dim=1)
    price = torch.tensor([block_flops(config, m) for m in range(first + n + 1)], dtype=torch.float64)
    embedding = 2 * n * 3 * config.patch**2 * config.width
    looks = torch.zeros(len(lengths), dtype=torch.float64)
    if actor is not None:
        seen = torch.stack([lengths[:, block - 1] for block in actor.config.blocks], dim=1)
        looks = torch.tensor([actor.flops(m) for m in range(first + n + 1)], dtype=torch.float64)[seen].sum(dim=1)
    cost = price[lengths].sum(dim=1) + embedding + looks
    return (cost / (config.layers * price[first + n] + embedding)).float()


@torch.no_grad()
def speed(vit: ViT, drawn: Drawn, by: DORA, batches: tuple[int, ...] = (1, 4), rounds: int = 12) -> list[dict[str, Cell]]:
    """Rows {batch, method, budget, pictures_per_second, ratio}: medians of rounds in which whole and pruned runs take turns."""
    rows: list[dict[str, Cell]] = []
    for batch in batches:
        inputs = [Preprocess()(drawn(range(start * batch, (start + 1) * batch))[0]).to(vit.position.dtype) for start in range(rounds)]
        patches = inputs[0].shape[2] * inputs[0].shape[3] // vit.config.patch**2
        plans: dict[tuple[str, str], Shortening | Pruning] = {("whole", "-"): WHOLE, ("dora", "adaptive"): Pruning(by, patches, False)}
        plans |= {("dora", str(share)): Pruning(by, round(share * patches)) for share in (0.5, 0.25)}
        times: dict[tuple[str, str], list[float]] = {plan: [] for plan in plans}
        for x in (inputs[0], *inputs):
            for plan, shortening in plans.items():
                started = time.perf_counter()
                vit(x, shortening=shortening)
                times[plan].append(time.perf_counter() - started)
        whole = statistics.median(times["whole", "-"][1:])
        for (method, budget), seconds in times.items():
            median = statistics.median(seconds[1:])
            rows.append(
                {"batch": batch, "method": method, "budget": budget, "pictures_per_second": batch / median, "ratio": whole / median}
            )
    return rows
