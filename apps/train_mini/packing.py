"""Packed rows for stage 1: one picture or clip, and as many questions about it as fit.

One row is [start][k visual tokens][question 1, answer 1][question 2, answer 2]...; every pair sees the start, the visual tokens and itself,
and its positions restart after the visual tokens, so one image pays for a dozen questions. k is drawn anew for every row: most rows see a
subset, so dropping tokens later is nothing new. A few rows are blind, so the model knows what guessing is.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.apps.train_mini.backdrop import before, on_a_photo
from mmsdk.apps.train_mini.features import Sample, Shard, cells_of
from mmsdk.apps.train_mini.scenes import Thing
from mmsdk.apps.train_mini.wording import QA
from mmsdk.models.mini.projector import place_features
from mmsdk.models.mini.words import BOS, EOS, asked
from mmsdk.models.types import Codec

__all__ = ["Batch", "pack", "subset"]

_WEIGHTS = {"caption": 0.4, "colour": 1.5, "count": 2.0, "yes/no": 3.0}
"""What a token of an answer counts in the loss: a caption has twenty of them, a yes one."""
_AIMED, _ON_THINGS = 0.9, (0.1, 0.6)
_ELSEWHERE = 0.35
"""How many of the scenes that are drawn on photographs are put before another picture's background."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows. `visual` lists the places of visual tokens in the flattened batch, in the order of `features`.

    `answers` are the places that predict an answer token, `labels` those tokens, `owner` the number of the question that each belongs to,
    and `kinds` the type of each question.
    """

    ids: Tensor
    positions: Tensor
    mask: Float[Tensor, "b 1 s s"]
    visual: Tensor
    features: Tensor
    places: Tensor
    answers: Tensor
    labels: Tensor
    weights: Tensor
    owner: Tensor
    kinds: tuple[str, ...]

    def to(self, device: torch.device) -> "Batch":
        """The same rows on a device: packed on the processor, wherever they are trained on, so that a step is the same rows everywhere."""
        return replace(
            self,
            ids=self.ids.to(device), positions=self.positions.to(device), mask=self.mask.to(device), visual=self.visual.to(device),
            features=self.features.to(device), places=self.places.to(device), answers=self.answers.to(device),
            labels=self.labels.to(device), weights=self.weights.to(device), owner=self.owner.to(device),
        )  # fmt: skip


def _pair(qa: QA, tokenizer: Codec, cache: dict[str, list[int]]) -> tuple[list[int], list[int]]:
    """Ids of the question part and of the answer part, ended by EOS."""
    question, answer = asked(qa.question), f" {qa.answer}"
    for text in (question, answer):
        if text not in cache:
            cache[text] = tokenizer.encode(text)
    return cache[question], [*cache[answer], EOS]


def _enough(sample: Sample, rng: np.random.Generator) -> list[QA]:
    """Questions in several wordings, so that a row of a sample with little to ask is filled all the same."""
    found = sample.questions(rng)
    for _ in range(4):
        if len(found) < 16:
            found += sample.questions(rng)
    return list(dict.fromkeys(found))


def subset(shard: Shard, i: int, k: int, rng: np.random.Generator) -> Tensor:
    """k of sample i's tokens, ascending; a clip gives the same number from every frame.

    Most times tokens on things go first, one of each thing before a second of any, up to a share drawn from `_ON_THINGS`: where chance
    alone decides, a small thing is often gone altogether, and the model is taught to guess; where things fill most of what is shown, it is
    lost among the many tokens of a whole clip.
    """
    n, grid = int(shard.counts[i]), shard.grids[i].tolist()
    if k >= n:
        return torch.arange(n)
    plane, share = n // grid[0], k // grid[0]
    cells = cells_of(shard.samples[i], grid) if rng.random() < _AIMED else []
    most = round(rng.uniform(*_ON_THINGS) * share)
    keep = []
    for t in range(grid[0]):
        order = rng.permutation(plane)
        things = _in_turn([(index - t * plane, thing) for index, thing in cells if index // plane == t], rng)[:most]
        others = np.setdiff1d(order, things, assume_unique=True)
        chosen = np.concatenate((things, rng.permutation(others)[: share - len(things)]))
        keep.append(t * plane + np.sort(chosen))
    return torch.from_numpy(np.concatenate(keep))


def _in_turn(cells: Sequence[tuple[int, Thing]], rng: np.random.Generator) -> np.ndarray:
    """The cells in a random order: the first of every thing, then the second of every thing, and so on; a shared cell counts once."""
    queues: dict[int, list[int]] = {}
    for i in rng.permutation(len(cells)):
        index, thing = cells[int(i)]
        queues.setdefault(id(thing), []).append(index)
    turns = [index for turn in itertools.zip_longest(*queues.values()) for index in turn if index is not None]
    return np.array(list(dict.fromkeys(turns)), dtype=int)


def pack(
    shard: Shard, rows: Sequence[int], length: int, budgets: Sequence[int], tokenizer: Codec, rng: np.random.Generator,
    cache: dict[str, list[int]], blind: float = 0.0, seen: Sequence[int] | None = None, once: bool = False,
    behind: Sequence[tuple[Shard, int]] = (), embedded: Sequence[Tensor] = (),
) -> Batch:  # fmt: skip
    """Rows of `length` tokens: the visual tokens of each sample (at most its budget) and as many of its questions as fit.

    Where embeddings of each row's tokens are given as `embedded`, these are shown; they stand in `features`, and no places with them.
    `seen` shows the tokens of other samples instead, as a control; `once` asks every question in one wording only.
    `behind` are pictures, one for each row as a shard and a number in it, before whose backgrounds some drawn scenes are put.
    """
    ids = torch.full((len(rows), length), EOS)
    positions = torch.zeros(len(rows), length, dtype=torch.long)
    segment = torch.full((len(rows), length), -1)
    visual: list[Tensor] = []
    features: list[Tensor] = []
    places: list[Tensor] = []
    answers: list[int] = []
    labels: list[int] = []
    weights: list[float] = []
    owner: list[int] = []
    kinds: list[str] = []
    for r, (i, shown, budget) in enumerate(zip(rows, rows if seen is None else seen, budgets, strict=True)):
        sample: Sample = shard.samples[i]
        if embedded:
            features.append(embedded[r])
        else:
            chosen = subset(shard, shown, budget, rng)
            tokens = shard.tokens(shown, chosen)
            moved = behind and on_a_photo(sample) and rng.random() < _ELSEWHERE
            features.append(before(*behind[r], tokens, chosen, sample, rng) if moved else tokens.features)
            places.append(place_features(tokens))
        k = len(features[-1])
        visual.append(torch.arange(1, k + 1) + r * length)
        ids[r, 0] = BOS
        positions[r, : k + 1] = torch.arange(k + 1)
        segment[r, : k + 1] = 0
        at, part = k + 1, 0
        questions = sample.questions(rng) if once else _enough(sample, rng)
        for index in rng.permutation(len(questions)):
            qa = questions[int(index)]
            asked, answer = _pair(qa, tokenizer, cache)
            size = len(asked) + len(answer)
            if at + size > length:
                continue
            part += 1
            ids[r, at : at + size] = torch.tensor(asked + answer)
            positions[r, at : at + size] = torch.arange(size) + k + 1
            segment[r, at : at + size] = part
            start = r * length + at + len(asked) - 1
            answers += range(start, start + len(answer))
            labels += answer
            weights += [_WEIGHTS.get(qa.type, 1.0)] * len(answer)
            owner += [len(kinds)] * len(answer)
            kinds.append(qa.type)
            at += size
    mask = _mask(segment, torch.from_numpy(rng.random(len(rows)) < blind))
    return Batch(
        ids, positions, mask, torch.cat(visual), torch.cat(features), torch.cat(places) if places else torch.zeros(0, 0),
        torch.tensor(answers, dtype=torch.long), torch.tensor(labels, dtype=torch.long), torch.tensor(weights),
        torch.tensor(owner, dtype=torch.long), tuple(kinds),
    )  # fmt: skip


def _mask(segment: Tensor, blind: Tensor) -> Tensor:
    """0 where a token may look, -inf elsewhere: back only, at the prefix and its own pair; blind rows see the prefix's start alone."""
    same = segment[:, :, None] == segment[:, None, :]
    prefix = (segment == 0)[:, None, :] & ~(blind[:, None, None] & (torch.arange(segment.shape[1]) > 0))
    causal = torch.ones(segment.shape[1], segment.shape[1], dtype=torch.bool).tril()
    seen = (same | prefix) & causal
    return torch.where(seen, 0.0, -torch.inf).unsqueeze(1)
