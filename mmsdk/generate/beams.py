"""Beam search: of all beginnings of an answer the likeliest few are kept, and the best of those that ended is the answer.

    (found,) = search(decoder, hidden, cache, [GenerationConfig(num_beams=4)], tokenizer.decode, stop_ids)
    print(found[0].text, found[0].score)

As transformers' `generate(num_beams=k, do_sample=False)`, with its names. A step looks at the likeliest continuations of all k beams of a
question: those among the first k that end are answers, and the best k that go on are the next beams. An answer's score is the sum of the
logarithms of its probabilities (penalties taken off, the end-of-text id among them) divided by its length to the power `length_penalty`;
the best k are kept. A question is done when it has k of them and `early_stopping` is True, or its best beam, at its length so far, scores
no higher than the worst of them. That is a guess where longer answers score higher: "never" then takes the length that it could have,
`max_tokens`. What ends an answer beside the end-of-text id is as everywhere (`mmsdk.generate.loop`): a stop string, a form that is
complete, `max_tokens`, `max_time`.

A prompt is read once. Beams are rows of its cache, selected anew wherever they change places (`KVCache.select`); in pages they share all
blocks that are full, and one that several would write into is copied.

Letters: b questions, r beams of all of them, v words of the vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.decoder.steps import next_scores
from mmsdk.decoder.types import Speaker
from mmsdk.errors import InputError, MmsdkError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.constrain import Guide, masked
from mmsdk.generate.logprobs import Likely, Said
from mmsdk.generate.loop import Finish, Generated, Reply, replies
from mmsdk.generate.penalties import Penalties
from mmsdk.generate.text import Decode
from mmsdk.kv.types import KVCache

__all__ = ["Search", "penalties_of", "search", "ways_of", "working"]

# Bytes of a step: of each beam and word, in float32, logits, probabilities, scores, and what is chosen from; of each way looked at, its
# numbers as tensors, as Python's, and as a value.
_WORD, _WAY = 6 * 4, 320


@dataclass(frozen=True, slots=True)
class Beam:
    """A beginning of an answer, and the sum of the logarithms of its probabilities. `row` is where in the batch its own beginning was."""

    reply: Reply
    row: int
    total: float = 0.0
    ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[Said, ...] = ()


@dataclass(frozen=True, slots=True)
class Way:
    """A token by which a beam, at this row of the batch, may go on: -1 where its scores are not finite. `total` is the sum with it."""

    beam: Beam
    row: int
    token: int
    total: float
    logprobs: tuple[Said, ...] = ()

    def gone(self) -> tuple[Beam, Finish | None]:
        """The beam with the token, and why it ends there, if it does."""
        reply = self.beam.reply.fork()
        step = reply.push(self.token, self.logprobs)
        before = self.beam
        said = before.ids + step.ids, before.text + step.text, before.logprobs + step.logprobs
        return Beam(reply, self.row, self.total, *said), step.finish


def working(config: GenerationConfig, vocabulary: int, ends: int) -> int:
    """About how many bytes a step of one question takes beside its cache, in a vocabulary of which so many ids end an answer."""
    return int(config.num_beams) * (vocabulary * _WORD + min(vocabulary, _looked_at(config, ends)) * _WAY)


def _looked_at(config: GenerationConfig, ends: int) -> int:
    """How many ways of each beam a step looks at: should the best be to end, by so many ids, there are enough that go on."""
    return max(2, 1 + ends) * int(config.num_beams)


class Search:
    """The beams of one question, and its answers so far, both best first. `looked_at` are the ways that a step looks at."""

    def __init__(self, number: int, first: Reply, ends: int) -> None:
        self.number = number
        self.config = first.config
        self.beams = [Beam(first, number)]
        self.answers: list[Generated] = []
        self.looked_at = _looked_at(self.config, ends)
        self._length = 0

    @property
    def done(self) -> bool:
        """Whether no more is looked for."""
        config = self.config
        if not self.beams:
            return True
        if len(self.answers) < config.num_beams:
            return False
        if config.early_stopping is True:
            return True
        length = config.max_tokens if config.early_stopping == "never" and config.length_penalty > 0 else self._length
        return self._score(self.beams[0].total, length) <= self.answers[-1].score

    def step(self, ways: Sequence[Way]) -> None:
        """Go on by the best of these, which may end it."""
        self._length += 1
        most, beams = self.config.num_beams, list[Beam]()
        for rank, way in enumerate(sorted(ways, key=lambda way: -way.total)[: self.looked_at]):
            if rank >= most and len(beams) == most:
                break
            beam, finish = way.gone()
            if isinstance(finish, MmsdkError):
                self.beams, self.answers = [], [Generated(beam.text, beam.ids, finish)]
                return
            if finish is None and len(beams) < most:
                beams.append(beam)
            elif finish is not None and rank < most:
                score = self._score(beam.total, self._length)
                self.answers.append(Generated(beam.text, beam.ids, finish, beam.logprobs, score))
        self.beams = beams
        self.answers = sorted(self.answers, key=lambda answer: -answer.score)[:most]

    def found(self) -> tuple[Generated, ...]:
        """The answers, or what was wrong in the place of them."""
        if self.answers:
            return tuple(self.answers)
        nothing = InputError("no token goes on with it; ask for another form", item=self.config.constraint.kind)
        return (Generated("", (), nothing),)

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(length, self.config.length_penalty)


def search(
    decoder: Speaker,
    hidden: Float[Tensor, "b d"],
    cache: KVCache,
    configs: Sequence[GenerationConfig],
    decode: Decode,
    stop_ids: frozenset[int],
    prompts: Sequence[Sequence[int]] = (),
    began: float = math.inf,
    guides: Sequence[Guide] = (),
) -> list[tuple[Generated, ...]]:
    """The best answers of every row, at most as many as it has beams, the best first.

    What is given is as in `mmsdk.generate.loop.generate`. Each row has its own number of beams, where one is greedy. The cache stays as it
    is. A row of which a beam's logits are not finite, or its form cannot be followed, has one answer, whose finish is that error. But for
    what the cache asks, the host waits once a token.

    Raises InputError for a wrong number of configs, and for constraints without guides.
    """
    firsts = replies(len(hidden), configs, decode, stop_ids, began, guides)
    rows = [Search(place, first, len(stop_ids)) for place, first in enumerate(firsts)]
    with torch.no_grad():
        logits = decoder.logits(hidden)
        batch = Batch(decoder, cache, penalties_of(configs, prompts, logits))
        going = rows
        while True:
            beams = [beam for row in going for beam in row.beams]
            ways = iter(ways_of(logits, beams, batch.penalties, going))
            for row in going:
                row.step(list(chain.from_iterable([next(ways) for _ in row.beams])))
            going = [row for row in going if not row.done]
            if not going:
                return [row.found() for row in rows]
            logits = batch.step(going)


class Batch:
    """What all beams have in common: the cache, in whose rows they lie one question behind the other, and who speaks for them."""

    def __init__(self, decoder: Speaker, cache: KVCache, penalties: tuple[Penalties, ...]) -> None:
        self.penalties = penalties
        self._decoder = self._speaker = decoder
        self._cache = cache
        self._owners = self._rows = list[int]()

    def step(self, going: Sequence[Search]) -> Float[Tensor, "r v"]:
        """The scores of what follows every beam, which the cache then holds."""
        beams = [beam for search in going for beam in search.beams]
        rows = [beam.row for beam in beams]
        ids, index = torch.tensor([[beam.ids[-1] for beam in beams], rows], device=self._cache.position.device)
        # the first rows are the caller's, who may go on in them; later ones that keep their places are as they should be
        if rows != self._rows:
            self._cache = self._cache.select(index)
            self.penalties = tuple(one.select(index) for one in self.penalties)
            self._rows = list(range(len(rows)))
        owners = [search.number for search in going for _ in search.beams]
        if owners != self._owners:
            self._owners, self._speaker = owners, self._decoder.among(owners)
        for one in self.penalties:
            one.count(ids)
        return next_scores(self._speaker, ids, self._cache)


def penalties_of(
    configs: Sequence[GenerationConfig], prompts: Sequence[Sequence[int]], logits: Float[Tensor, "b v"]
) -> tuple[Penalties, ...]:
    """Those of rows of which nothing was said yet, where any has one; words and device are those of `logits`."""
    if not any(config.penalised for config in configs):
        return ()
    return (Penalties.of(configs, prompts, logits.shape[-1], logits.device),)


def ways_of(
    logits: Float[Tensor, "r v"], beams: Sequence[Beam], penalties: Sequence[Penalties], going: Sequence[Search]
) -> list[list[Way]]:
    """How every beam of these searches, one search behind the other, may go on, the best first. Here the host waits, once."""
    v = logits.shape[-1]
    looked_at, most = (min(v, max(counts)) for counts in zip(*((one.looked_at, int(one.config.logprobs)) for one in going), strict=True))
    logprobs = logits.float().log_softmax(-1)
    scores = logprobs
    for one in penalties:
        scores = one(scores)
    totals = torch.tensor([beam.total for beam in beams], device=logits.device)
    best = (masked(scores, [beam.reply.guide for beam in beams]) + totals[:, None]).topk(looked_at)
    likely = logprobs.topk(most)
    # one transfer: float32 has all whole numbers up to 2**24, and no vocabulary is as large
    columns = best.values, best.indices, logprobs.gather(-1, best.indices), likely.indices, likely.values
    finite = logits.amax(-1, keepdim=True).isfinite()
    told = torch.cat([x.float() for x in (finite, *columns)], dim=-1).tolist()
    return [_of_one(beam, row, one, looked_at) for row, (beam, one) in enumerate(zip(beams, told, strict=True))]


def _of_one(beam: Beam, row: int, told: Sequence[float], looked_at: int) -> list[Way]:
    """The ways of one beam, from the numbers of its row."""
    if not told[0]:
        return [Way(beam, row, -1, math.inf)]
    totals, ids, said = (told[1 + part * looked_at : 1 + (part + 1) * looked_at] for part in range(3))
    rest, asked = told[1 + 3 * looked_at :], int(beam.reply.config.logprobs)
    half = len(rest) // 2
    top = tuple(Likely(int(token), logprob) for token, logprob in zip(rest[:asked], rest[half : half + asked], strict=True))
    ways = [(int(token), total, logprob) for token, total, logprob in zip(ids, totals, said, strict=True) if total > -math.inf]
    return [Way(beam, row, token, total, (Said(token, logprob, top),) if asked else ()) for token, total, logprob in ways]
