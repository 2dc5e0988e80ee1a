"""The training loop of stage 1: seeded batches, checkpoints that a later run resumes from exactly, and teacher-forced accuracy."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mmsdk.apps import kept
from mmsdk.apps.descent import cosine
from mmsdk.apps.interrupts import Stop
from mmsdk.apps.train_mini.features import Sample, Shard
from mmsdk.apps.train_mini.finetune import Adapters, Recipe, forward, layer_forward, loss_of
from mmsdk.apps.train_mini.packing import Batch, pack
from mmsdk.decoder.transformer import Decoder
from mmsdk.models.mini.projector import Projector
from mmsdk.models.types import Codec

__all__ = ["evaluate", "finetune"]

_MIX = {"scene": 0.50, "photo": 0.02, "robot": 0.13, "clip": 0.32, "robot clip": 0.03}
STILLS, CLIPS = ("scene", "photo", "robot"), ("clip", "robot clip")
_IMAGE_TOKENS, _IMAGE_SHARES = (64, 96, 128), (0.6, 0.25, 0.15)
_CLIP_TOKENS, _CLIP_SHARES = (128, 160, 192), (0.3, 0.3, 0.4)


def family(sample: Sample) -> str:
    """Which part of the mixture a sample belongs to."""
    if sample.clip is not None:
        return "robot clip" if sample.clip.story == "robot" else "clip"
    assert sample.scene is not None
    return sample.scene.suite


class Mixture:
    """Draws rows by the shares of `_MIX`, of the families that are there and the samples that something can be asked about."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.rows: dict[str, list[tuple[int, int]]] = {}
        for s, shard in enumerate(shards):
            for i, sample in enumerate(shard.samples):
                if sample.questions(np.random.default_rng(0)):
                    self.rows.setdefault(family(sample), []).append((s, i))

    def draw(self, rng: np.random.Generator, rows: int, families: Sequence[str]) -> tuple[Shard, list[int]]:
        """A shard and `rows` of its samples of these families; a family it lacks is drawn from those it has."""
        s = int(rng.choice(len(self.shards), p=self._shares(families)))
        mine = {f: [i for t, i in found if t == s] for f, found in self.rows.items() if f in families}
        names = [f for f, found in mine.items() if found]
        weight = np.array([_MIX[f] for f in names])
        picks = rng.choice(len(names), rows, p=weight / weight.sum())
        return self.shards[s], [mine[names[p]][int(rng.integers(len(mine[names[p]])))] for p in picks]

    def _shares(self, families: Sequence[str]) -> np.ndarray:
        share = np.zeros(len(self.shards))
        for name, found in ((f, rows) for f, rows in self.rows.items() if f in families):
            owners = Counter(s for s, _ in found)
            for s, n in owners.items():
                share[s] += _MIX[name] * n / len(found)
        normalised: np.ndarray = share / share.sum()
        return normalised


def batch_of(mixture: Mixture, recipe: Recipe, step: int, tokenizer: Codec, cache: dict[str, list[int]]) -> Batch:
    """The batch of a step: a pure function of the recipe's seed and the step."""
    rng = np.random.default_rng((recipe.seed, 7, step))
    if step >= recipe.steps - recipe.full_steps:
        share = {f: _MIX[f] if f in mixture.rows else 0.0 for f in STILLS + CLIPS}
        moving = rng.random() * sum(share.values()) < sum(share[f] for f in CLIPS)
        shard, rows = mixture.draw(rng, recipe.rows, CLIPS if moving else STILLS)
        budgets = [shard.features.shape[1]] * len(rows)
        length = recipe.clip_room + 512 if moving else recipe.room + 256
        return pack(shard, rows, length, budgets, tokenizer, rng, cache, recipe.blind, behind=_behind(mixture, recipe, rng))
    shard, rows = mixture.draw(rng, recipe.rows, ("scene",) if step < recipe.scene_steps else STILLS + CLIPS)
    budgets = [_budget(shard.samples[i], rng) for i in rows]
    return pack(shard, rows, recipe.length, budgets, tokenizer, rng, cache, recipe.blind, behind=_behind(mixture, recipe, rng))


def _behind(mixture: Mixture, recipe: Recipe, rng: np.random.Generator) -> list[tuple[Shard, int]]:
    """A still picture of any family for every row, to borrow a background from."""
    shard, rows = mixture.draw(rng, recipe.rows, STILLS)
    return [(shard, i) for i in rows]


def _budget(sample: Sample, rng: np.random.Generator) -> int:
    tokens, shares = (_IMAGE_TOKENS, _IMAGE_SHARES) if sample.clip is None else (_CLIP_TOKENS, _CLIP_SHARES)
    return int(rng.choice(tokens, p=shares))


def save(folder: Path, step: int, projector: Projector, adapters: Adapters, optimiser: torch.optim.Optimizer) -> None:
    """Everything a resumed run needs, on whatever device; written whole or not at all."""
    parts = {"projector": projector.state_dict(), "adapters": adapters.state_dict()}
    kept.save(folder / "checkpoint.safetensors", parts, optimiser, {"step": str(step)})


def resume(folder: Path, projector: Projector, adapters: Adapters, optimiser: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one, to where the modules are; returns the step to go on with."""
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        return 0
    parts, facts = kept.resume(path, optimiser)
    projector.load_state_dict(parts["projector"])
    adapters.load_state_dict(parts["adapters"])
    return int(facts["step"])


def finetune(
    decoder: Decoder, projector: Projector, adapters: Adapters, shards: Sequence[Shard], tokenizer: Codec, recipe: Recipe, folder: Path,
    layer: Callable[..., Tensor] = layer_forward, stop_after: int | None = None,
) -> bool:  # fmt: skip
    """Train in place, on the decoder's device, from the last checkpoint in `folder` to the end; returns whether it came there.

    The first Ctrl-C ends it after the step that is being made, `stop_after` after so many, the checkpoint saved; the second one at once.
    """
    optimiser = torch.optim.AdamW(
        [{"params": adapters.parameters(), "lr": recipe.lr}, {"params": projector.parameters(), "lr": recipe.projector_lr}],
        betas=(0.9, 0.98), weight_decay=0.01, fused=True,
    )  # fmt: skip
    peaks = [group["lr"] for group in optimiser.param_groups]
    first = resume(folder, projector, adapters, optimiser)
    mixture, running = Mixture(shards), {"loss": 0.0, "right": 0.0}
    cache: dict[str, list[int]] = {}
    dtype, device = decoder.embedding.weight.dtype, decoder.embedding.weight.device
    bar = tqdm(range(first, recipe.steps), initial=first, total=recipe.steps, desc="fine-tuning", unit="step", mininterval=10)
    with bar, Stop() as stopping:
        for step in bar:
            batch = batch_of(mixture, recipe, step, tokenizer, cache).to(device)
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["lr"] = peak * cosine(step, recipe.steps, 1.0, recipe.warmup, least=0.03)
            hidden = forward(decoder, projector, adapters.cast(dtype), batch, layer)
            loss, right = loss_of(decoder, hidden, batch)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([*adapters.parameters(), *projector.parameters()], 1.0)
            optimiser.step()
            keep = 0.0 if step == first else 0.97
            running["loss"] = keep * running["loss"] + (1 - keep) * float(loss.detach())
            running["right"] = keep * running["right"] + (1 - keep) * float(right.float().mean())
            bar.set_postfix(loss=f"{running['loss']:.3f}", right=f"{running['right']:.3f}", refresh=False)
            cut = stopping.asked or (stop_after is not None and step + 1 - first >= stop_after)
            if cut or step + 1 == recipe.steps or (step + 1) % 50 == 0:
                save(folder, step + 1, projector, adapters, optimiser)
                with (folder / "log.jsonl").open("a") as log:
                    log.write(json.dumps({"step": step + 1, **{k: round(v, 4) for k, v in running.items()}}) + "\n")
            if cut:
                return not stopping.asked and step + 1 == recipe.steps
    return True


@torch.no_grad()
def evaluate(
    decoder: Decoder, projector: Projector, adapters: Adapters, shard: Shard, rows: Sequence[int], tokenizer: Codec, *,
    room: int = 160, blind: bool = False, shuffled: bool = False, seed: int = 0,
) -> dict[str, tuple[int, float]]:  # fmt: skip
    """Per type (n, share of answers whose every token is the argmax under teacher forcing: what greedy decoding would answer exactly).

    Every visual token is shown, and as many questions of a sample as fit into `room` tokens after them.
    Controls: `blind` hides all visual tokens; `shuffled` shows every row the picture of the next.
    """
    hits: dict[str, list[bool]] = {}
    cast = adapters.cast(decoder.embedding.weight.dtype)
    cache: dict[str, list[int]] = {}
    for start in tqdm(range(0, len(rows), 4), desc="asking", unit="batch", mininterval=2):
        group = list(rows[start : start + 4])
        rng = np.random.default_rng((seed, start))
        seen = [rows[(start + i + 1) % len(rows)] for i in range(len(group))] if shuffled else group
        longest = int(shard.counts[[*group, *seen]].max())
        packed = pack(shard, group, longest + room, [longest] * len(group), tokenizer, rng, cache, 1.0 if blind else 0.0, seen, once=True)
        batch = packed.to(decoder.embedding.weight.device)
        _, right = loss_of(decoder, forward(decoder, projector, cast, batch), batch)
        wrong = torch.zeros(len(batch.kinds), device=right.device).index_add(0, batch.owner, (~right).float())
        for kind, misses in zip(batch.kinds, wrong.tolist(), strict=True):
            hits.setdefault(kind, []).append(misses == 0)
    return {kind: (len(found), sum(found) / len(found)) for kind, found in sorted(hits.items())}
