"""Distillation: next-token KL at the answers between mini reading all tokens of a picture and the same mini reading a few coded ones.

A batch is packed as for mini's own training, [start][n visual tokens][question 1, answer 1]..., of inputs of one grid; the pupil reads the
same rows with k visual tokens, and everything behind them moves up by n - k places, as it does in the pipeline. Nothing of mini is trained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk.apps.train_braco.sets import Media
from mmsdk.apps.train_mini.features import Shard
from mmsdk.apps.train_mini.finetune import through
from mmsdk.apps.train_mini.packing import Batch, pack
from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.none import NoCache
from mmsdk.models.mini.family import Mini
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.transform import Grid, inside
from mmsdk.tokencomp.types import Compressor
from mmsdk.vision.types import VisualTokens

__all__ = ["Lesson", "Lessons", "Score", "compressed", "divergence", "on_grid", "read", "read_beside", "score", "shorter"]


@dataclass(frozen=True, slots=True)
class Lesson:
    """A batch with every visual token, and these as embeddings, on one grid."""

    batch: Batch
    embeddings: Float[Tensor, "b n d"]
    grid: Grid


class Lessons:
    """Batches of one grid each, drawn from shards; the one of a step is a function of the seed and the step alone.

    `room` tokens of questions follow the visual ones; every question of a sample is asked in one wording (`once`), or in some more.
    """

    def __init__(self, vlm: Mini, shards: Sequence[Shard], rows: int, room: Mapping[Media, int], once: bool = False) -> None:
        self._vlm, self._shards, self._rows, self._room, self._once = vlm, shards, rows, room, once
        self._cache: dict[str, list[int]] = {}
        self._groups: dict[Media, dict[tuple[int, Grid], list[int]]] = {"image": {}, "clip": {}}
        for s, shard in enumerate(shards):
            for i, (sample, grid) in enumerate(zip(shard.samples, shard.grids.tolist(), strict=True)):
                if sample.questions(np.random.default_rng(0)):
                    group: Grid = (grid[0], grid[1], grid[2])
                    self._groups[_media(group)].setdefault((s, group), []).append(i)

    def grids(self, media: Media) -> list[Grid]:
        """The grids that there are."""
        return sorted({grid for _, grid in self._groups[media]})

    def drawn(self, media: Media, seed: int, step: int) -> Lesson:
        """A group of inputs by its size, then `rows` of it."""
        rng = np.random.default_rng((seed, 11, step))
        groups = list(self._groups[media].items())
        sizes = np.array([len(rows) for _, rows in groups])
        (s, grid), rows = groups[int(rng.choice(len(groups), p=sizes / sizes.sum()))]
        return self._lesson(s, grid, [rows[int(rng.integers(len(rows)))] for _ in range(self._rows)], rng)

    def all(self, media: Media, most: int) -> list[Callable[[], Lesson]]:
        """The first `most` inputs, in order, each once."""
        chosen = sorted((i, s, grid) for (s, grid), rows in self._groups[media].items() for i in rows)[:most]
        groups: dict[tuple[int, Grid], list[int]] = {}
        for i, s, grid in chosen:
            groups.setdefault((s, grid), []).append(i)
        parts = [(place, rows[at : at + self._rows]) for place, rows in groups.items() for at in range(0, len(rows), self._rows)]
        return [partial(self._lesson, s, grid, rows, np.random.default_rng(rows[0])) for (s, grid), rows in parts]

    @torch.no_grad()
    def _lesson(self, s: int, grid: Grid, rows: Sequence[int], rng: np.random.Generator) -> Lesson:
        shard, n = self._shards[s], grid[0] * grid[1] * grid[2]
        room = self._room[_media(grid)]
        batch = pack(shard, rows, 1 + n + room, [n] * len(rows), self._vlm.tokenizer, rng, self._cache, once=self._once)
        return Lesson(batch, torch.stack(self._vlm.connect([shard.tokens(i) for i in rows])), grid)


@dataclass(frozen=True, slots=True)
class Score:
    """Over so many questions: the share whose every answer token is the most likely one, and the mean KL of a question's tokens."""

    questions: int
    accuracy: float
    kl: float


def read(decoder: Decoder, batch: Batch, embeddings: Float[Tensor, "b k d"]) -> Float[Tensor, "a d"]:
    """The final hidden states at the places that predict answer tokens."""
    words = decoder.embed(batch.ids)
    x = torch.cat([words[:, :1], embeddings.to(words.dtype), words[:, 1 + embeddings.shape[1] :]], dim=1)
    hidden = decoder(x, batch.positions, NoCache(), batch.mask)
    answers: Tensor = hidden.flatten(0, 1)[batch.answers]
    return answers


def read_beside(
    decoder: Decoder, batches: Sequence[Batch], embeddings: Sequence[Float[Tensor, "b _ d"]], layer: Callable[..., Tensor]
) -> list[Float[Tensor, "_ d"]]:
    """The same of several batches of one pass, for training: their rows below one another, filled up to the longest.

    `layer` computes a layer, as `mmsdk.apps.train_mini.finetune.layer_forward` does.
    """
    longest = max(batch.ids.shape[1] for batch in batches)
    wide = [_filled(batch, longest) for batch in batches]
    starts = accumulate((longest * len(batch.ids) for batch in batches), initial=0)
    answers = torch.cat([batch.answers + start for batch, start in zip(wide, starts, strict=False)])
    ids, positions, mask = (torch.cat(column) for column in zip(*((one.ids, one.positions, one.mask) for one in wide), strict=True))
    words = decoder.embed(ids)
    seen = zip(words.split([len(batch.ids) for batch in batches]), embeddings, strict=True)
    x = torch.cat([torch.cat([row[:, :1], some.to(row.dtype), row[:, 1 + some.shape[1] :]], dim=1) for row, some in seen])
    rows = replace(batches[0], ids=ids, positions=positions, mask=mask, answers=answers)
    return list(through(decoder, x, rows, layer=layer).split([len(batch.answers) for batch in batches]))


def _filled(batch: Batch, length: int) -> Batch:
    """The same rows with more filling at their ends, which sees itself and is seen by nobody."""
    before, (rows, here) = batch.mask, batch.ids.shape
    mask = torch.full((rows, 1, length, length), -torch.inf)
    mask.diagonal(dim1=2, dim2=3).zero_()
    mask[:, :, :here, :here] = before
    more = length - here
    places = batch.answers // here * length + batch.answers % here
    return replace(batch, ids=F.pad(batch.ids, (0, more)), positions=F.pad(batch.positions, (0, more)), mask=mask, answers=places)


def shorter(batch: Batch, n: int, k: int) -> Batch:
    """The same questions behind k visual tokens of each row in place of n."""
    length = batch.ids.shape[1]
    columns = torch.cat([torch.arange(k + 1), torch.arange(n + 1, length)])
    rows = batch.answers // length
    return replace(
        batch,
        ids=batch.ids[:, columns],
        # filling has no place of its own
        positions=torch.where(columns > n, batch.positions[:, columns] - (n - k), batch.positions[:, columns]).clamp_min(0),
        mask=batch.mask[:, :, columns][..., columns],
        answers=batch.answers - (rows + 1) * (n - k),
    )


def divergence(decoder: Decoder, teacher: Float[Tensor, "a d"], pupil: Float[Tensor, "a d"], batch: Batch) -> Float[Tensor, " q"]:
    """KL(teacher || pupil) of the next token, the mean over each question's answer."""
    p, q = (F.log_softmax(decoder.logits(hidden), dim=-1) for hidden in (teacher, pupil))
    each = F.kl_div(q, p, reduction="none", log_target=True).sum(dim=1)
    return _by_question(each, batch) / _by_question(torch.ones_like(each), batch)


@torch.no_grad()
def score(vlm: Mini, lessons: Sequence[Callable[[], Lesson]], methods: Sequence[Compressor], count: int) -> list[Score]:
    """The full model, then each method at `count` tokens, on the same questions."""
    found: list[list[Tensor]] = [[] for _ in range(1 + len(methods))]
    for make in lessons:
        lesson = make()
        batch, n = lesson.batch, lesson.embeddings.shape[1]
        teacher = read(vlm.decoder, batch, lesson.embeddings)
        found[0].append(torch.stack([_right(vlm.decoder, teacher, batch), torch.zeros(len(batch.kinds))]))
        small = shorter(batch, n, count)
        for kept, method in zip(found[1:], methods, strict=True):
            pupil = read(vlm.decoder, small, compressed(lesson, method, count))
            kept.append(torch.stack([_right(vlm.decoder, pupil, batch), divergence(vlm.decoder, teacher, pupil, batch)]))
    columns = [torch.cat(one, dim=1) for one in found]
    return [Score(right.shape[0], float(right.mean()), float(kl.mean())) for right, kl in columns]


def compressed(lesson: Lesson, method: Compressor, count: int) -> Float[Tensor, "b k d"]:
    """The lesson's embeddings as a method leaves them."""
    tokens = [on_grid(x, lesson.grid) for x in lesson.embeddings]
    return torch.stack([one.tokens.features for one in method(tokens, [Budget(count)] * len(tokens))])


def on_grid(features: Float[Tensor, "n d"], grid: Grid) -> VisualTokens:
    """A full grid of tokens, each of one patch."""
    n, device = len(features), features.device
    return VisualTokens(
        features, inside(grid).to(device), torch.ones(n, device=device), grid, torch.arange(grid[0]).float(), torch.zeros(0)
    )


def _right(decoder: Decoder, hidden: Float[Tensor, "a d"], batch: Batch) -> Float[Tensor, " q"]:
    """1 for each question of which every answer token is the most likely one."""
    wrong = (decoder.logits(hidden).argmax(dim=1) != batch.labels).float()
    return (_by_question(wrong, batch) == 0).float()


def _by_question(values: Float[Tensor, " a"], batch: Batch) -> Float[Tensor, " q"]:
    return torch.zeros(len(batch.kinds)).index_add(0, batch.owner, values)


def _media(grid: Grid) -> Media:
    return "clip" if grid[0] > 1 else "image"
