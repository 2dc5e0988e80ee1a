"""Stage 0: ground the projector, patch by patch, in the language model's own words, with no language model in the loop.

The scenes are generated, so what each patch shows is known. The projector learns to send a patch to the sum of the input embeddings of
the words for it (name, colour, place, moment), by squared error and by cross-entropies over nearest words. It takes about a minute, and
the language model then starts from visual tokens that it almost reads.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mmsdk.apps.train_mini import vocabulary as words
from mmsdk.apps.train_mini.features import Shard, cells_of, place_of_cell
from mmsdk.apps.train_mini.questions_robot import on_the_table
from mmsdk.apps.train_mini.scenes import Thing
from mmsdk.models.mini.projector import Projector, place_features
from mmsdk.models.types import Codec

__all__ = ["Patches", "WordTable", "gather", "ground", "joined", "probe"]

_SLOTS = ("name", "colour", "place", "moment")
_MOMENTS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "last")


@dataclass(frozen=True, slots=True)
class WordTable:
    """The words of each slot and their embeddings: the mean over the tokens of " word"."""

    vocabulary: dict[str, dict[str, int]]
    vectors: dict[str, Float[Tensor, "w e"]]

    @staticmethod
    def of(embedding: Float[Tensor, "v e"], tokenizer: Codec) -> "WordTable":
        """A table of all that is drawn: names, words and numbers, colours, places and moments."""
        names = {*(kind.name for kind in words.OBJECTS), *words.SHAPES, *words.WORDS, *words.NUMBERS, *words.TABLETOP, "background"}
        lists = {"name": sorted(names), "colour": sorted(words.COLOURS), "place": list(words.PLACES), "moment": list(_MOMENTS)}
        vocabulary = {slot: {w: i for i, w in enumerate(ws)} for slot, ws in lists.items()}
        vectors = {slot: torch.stack([embedding[tokenizer.encode(" " + w)].float().mean(0) for w in ws]) for slot, ws in lists.items()}
        return WordTable(vocabulary, vectors)


@dataclass(frozen=True, slots=True)
class Patches:
    """Labelled patches: features [n d], places [n p], and the word of each slot [n 4] (-1 where a slot does not apply)."""

    features: Tensor
    places: Tensor
    labels: Tensor


def gather(shard: Shard, table: WordTable, *, backgrounds: int = 16, seed: int = 0) -> Patches:
    """All patches on things, and up to `backgrounds` others of each sample.

    A plain background has a colour like any thing, or the projector learns to drop it. Of robots only pictures are taken, and of those only
    what lies on the table: the rest is in every one of them.
    """
    rng = np.random.default_rng(seed)
    features, places, labels = [], [], []
    for i, sample in enumerate(shard.samples):
        if (sample.scene is not None and sample.scene.photo is not None) or (sample.clip is not None and sample.clip.story == "robot"):
            continue
        grid = [int(v) for v in shard.grids[i]]
        on = dict(cells_of(sample, grid))
        off = np.setdiff1d(np.arange(int(shard.counts[i])), np.fromiter(on, int, len(on)))
        if sample.scene is not None and sample.scene.suite == "robot":
            lying = {id(t) for t in on_the_table(sample.scene.things)}
            on = {index: thing for index, thing in on.items() if id(thing) in lying}
        chosen = sorted([*on, *rng.permutation(off)[:backgrounds].tolist()])
        if len(on) > 64:
            chosen = sorted(rng.permutation(chosen)[:64].tolist())
        tokens = shard.tokens(i, torch.tensor(chosen))
        features.append(tokens.features.half())
        places.append(place_features(tokens))
        plain = sample.scene.background if sample.scene is not None else ""
        labels += [_label(table, grid, index, on.get(index), plain) for index in chosen]
    return Patches(torch.cat(features), torch.cat(places), torch.tensor(labels))


def _label(table: WordTable, grid: Sequence[int], index: int, thing: Thing | None, background: str) -> tuple[int, int, int, int]:
    """The word of each slot for one cell: of the thing that it shows, or of the background."""
    t, place = place_of_cell(index, grid)
    shown = background if thing is None else thing.colour if thing.kind in ("object", "shape") else ""
    moment = -1 if grid[0] == 1 else min(t, len(_MOMENTS) - 1)
    name = table.vocabulary["name"][thing.name if thing else "background"]
    return name, table.vocabulary["colour"].get(shown, -1), table.vocabulary["place"][place], moment


def joined(parts: Sequence[Patches]) -> Patches:
    """All of them as one."""
    return Patches(*(torch.cat([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(Patches)))


def _targets(labels: Tensor, table: WordTable) -> Tensor:
    total = torch.zeros(len(labels), next(iter(table.vectors.values())).shape[1], device=labels.device)
    for column, slot in enumerate(_SLOTS):
        index = labels[:, column]
        total += table.vectors[slot][index.clamp(min=0)] * (index >= 0).unsqueeze(1)
    return total


def _logits(z: Tensor, table: WordTable, slot: str, mean: Tensor) -> Tensor:
    vectors = table.vectors[slot]
    return 4 * (z - mean) @ F.normalize(vectors - vectors.mean(0), dim=1).T


def ground(projector: Projector, patches: Patches, table: WordTable, *, steps: int = 1200, batch: int = 2048, seed: int = 0) -> float:
    """Train the projector in place (fp32, AdamW, one cycle), on its device and that of the table; returns the last running loss."""
    device = projector.up.weight.device
    generator = torch.Generator().manual_seed(seed)
    sample_targets = _targets(patches.labels[:: max(1, len(patches.labels) // 20000)].to(device), table)
    mean, scale = sample_targets.mean(0), sample_targets.std()
    optimiser = torch.optim.AdamW(projector.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps, pct_start=0.1)
    running = 0.0
    with tqdm(range(steps), desc="grounding", unit="step", mininterval=2) as bar:
        for step in bar:
            pick = torch.randint(len(patches.labels), (batch,), generator=generator)
            features, places, labels = (x[pick].to(device) for x in (patches.features, patches.places, patches.labels))
            with torch.autocast(device.type, torch.bfloat16):
                out = projector(features.float(), places)
            z = (out.float() - mean) / scale
            loss = F.mse_loss(z, (_targets(labels, table) - mean) / scale)
            for column, slot in enumerate(_SLOTS):
                logits = _logits(out.float() / scale, table, slot, mean / scale)
                if bool((labels[:, column] >= 0).any()):
                    loss = loss + 0.5 * F.cross_entropy(logits, labels[:, column], ignore_index=-1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            seen = float(loss.detach())
            running = seen if step == 0 else 0.98 * running + 0.02 * seen
            bar.set_postfix(loss=f"{running:.3f}", refresh=False)
    return running


@torch.no_grad()
def probe(projector: Projector, patches: Patches, table: WordTable) -> dict[str, float]:
    """Share of patches whose nearest word is the right one, per slot."""
    device = projector.up.weight.device
    parts = zip(patches.features.split(8192), patches.places.split(8192), strict=True)
    out = torch.cat([projector(features.to(device).float(), places.to(device)) for features, places in parts])
    every = patches.labels.to(device)
    mean = _targets(every, table).mean(0)
    found = {}
    for column, slot in enumerate(_SLOTS):
        labels = every[:, column]
        real = labels >= 0
        if bool(real.any()):
            found[slot] = float((_logits(out, table, slot, mean).argmax(1) == labels)[real].float().mean())
    return found
