"""The decoding loop: a token for every row, its text as it becomes certain, each row ending for itself.

    for step in generate(decoder, hidden, cache, configs, tokenizer.decode, stop_ids):
        print(step.text, end="")

Nothing runs ahead of what was asked for: a token is computed when the loop is asked for it. Closing the generator, or Ctrl-C, leaves
the cache with the tokens so far and nothing else behind.
"""

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.decoder.steps import next_scores
from mmsdk.decoder.types import Speaker
from mmsdk.errors import InputError, MmsdkError, ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.constrain import FREE, Guide, masked
from mmsdk.generate.logprobs import Said, likelihoods
from mmsdk.generate.sampling import Sampler
from mmsdk.generate.text import Decode, TextStream
from mmsdk.kv.types import KVCache

__all__ = ["Finish", "Generated", "Reply", "Step", "collect", "generate", "replies"]

Finish = Literal["stop", "length", "time"] | MmsdkError


@dataclass(frozen=True, slots=True)
class Step:
    """One row went on. `ids` are the tokens it gained (none for the one that only ends the text), `text` is what that set free.

    `finish` says why the row ends here, if it does: "stop" for an end-of-text id, a stop string, or a form that is complete, "length" for
    `max_tokens`, "time" for `max_time`, a ModelError where its logits are not finite, an InputError where its form cannot be followed
    further. A row gives no step after that one. `logprobs` are those of `ids`, where they were asked for.
    """

    row: int
    ids: tuple[int, ...]
    text: str
    finish: Finish | None = None
    logprobs: tuple[Said, ...] = ()


@dataclass(frozen=True, slots=True)
class Generated:
    """The whole of one row. The tokens of a stop string are among `ids`, its characters are not in `text`.

    Where `finish` is an error, the row's text is what it said before, and no answer. `score` is that of a search (`mmsdk.generate.beams`).
    """

    text: str
    ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[Said, ...] = ()
    score: float = 0.0


def generate(
    decoder: Speaker,
    hidden: Float[Tensor, "b d"],
    cache: KVCache,
    configs: Sequence[GenerationConfig],
    decode: Decode,
    stop_ids: frozenset[int],
    prompts: Sequence[Sequence[int]] = (),
    began: float = math.inf,
    guides: Sequence[Guide] = (),
) -> Generator[Step, None, None]:
    """Text from what the decoder knows, as a stream: the steps of all rows, in order of time, then of rows.

    `hidden` is the decoder's output at the last real token of every row's prompt, `cache` holds that prompt, `configs` has one entry
    a row, and `decode` leaves special tokens out. `prompts` are the ids of the words of every prompt, which a repetition penalty looks at;
    what pads them is never seen. `began` is when the work did, by `time.perf_counter`, which `max_time` counts from; by default now.
    `guides`, one a row, are those of the constraints, where there are any.
    The last token said is not in the cache yet; once half the rows of a batch have ended, the others go on in a copy of it.
    A row whose logits are not finite ends by itself, with a ModelError as its finish. Raises InputError for a wrong number of configs,
    for constraints without guides, and for beams, which `mmsdk.generate.beams` searches.
    """
    if any(config.num_beams > 1 for config in configs):
        raise InputError("beams are not said one token at a time; search for them (mmsdk.generate.beams)", item="num_beams")
    rows = replies(len(hidden), configs, decode, stop_ids, began, guides)
    logits = _scores(decoder, hidden)
    sampler = Sampler.of(configs, hidden.device, logits.shape[-1], prompts)
    while True:
        ids, told = _said(logits, sampler, rows)
        for row, token, logprobs in zip(rows, ids.tolist(), told, strict=True):
            if not row.finished:
                yield row.push(token, logprobs)
        going = [place for place, row in enumerate(rows) if not row.finished]
        if not going:
            return
        if 2 * len(going) <= len(rows):
            # Dropping rows copies the others: done at every halving, it costs less than running the finished ones on, unread.
            kept = torch.tensor(going, device=ids.device)
            cache, ids, sampler, rows = cache.select(kept), ids[kept], sampler.select(going), [rows[place] for place in going]
            decoder = decoder.among(going)
        logits = next_scores(decoder, ids, cache)


def collect(steps: Iterable[Step], rows: int) -> list[Generated]:
    """The whole of every row, from the stream that `generate` gives: streamed or not, the text is the same."""
    texts: list[list[str]] = [[] for _ in range(rows)]
    ids: list[list[int]] = [[] for _ in range(rows)]
    logprobs: list[list[Said]] = [[] for _ in range(rows)]
    ends: dict[int, Finish] = {}
    for step in steps:
        texts[step.row].append(step.text)
        ids[step.row].extend(step.ids)
        logprobs[step.row].extend(step.logprobs)
        if step.finish is not None:
            ends[step.row] = step.finish
    return [Generated("".join(texts[row]), tuple(ids[row]), ends[row], tuple(logprobs[row])) for row in range(rows)]


class Reply:
    """What one row has said so far, and whether it is done. `began` is when its work did, by `time.perf_counter`, at most now.

    `guide` is where it stands in its form, if it has one.
    """

    __slots__ = ("_count", "_number", "_stop_ids", "_text", "_until", "config", "finished", "guide")

    def __init__(
        self,
        number: int,
        config: GenerationConfig,
        text: TextStream,
        stop_ids: frozenset[int],
        began: float = math.inf,
        guide: Guide = FREE,
    ) -> None:
        self.config = config
        self.guide = guide
        self._number = number
        self._text = text
        self._stop_ids = stop_ids
        self._until = min(began, perf_counter()) + float(config.max_time)
        self._count = 0
        self.finished = False

    def push(self, token: int, logprobs: tuple[Said, ...] = ()) -> Step:
        """Take the next token, -1 where its scores were not finite, and how likely it was, where that was asked for."""
        if token < 0:
            error = ModelError(f"the scores of the answer's token {self._count} are not finite; try dtype float32")
            return self._last((), self._text.finish(), error)
        # a form that went wrong lets the end through
        if (problem := self.guide.problem) is not None:
            return self._last((), self._text.finish(), problem)
        if token in self._stop_ids:
            return self._last((), self._text.finish(), "stop")
        self._count += 1
        text = self._text.push(token)
        if self._text.stopped:
            return self._last((token,), text, "stop", logprobs)
        self.guide.push(token)
        if end := "stop" if self.guide.complete else self._over():
            rest = self._text.finish()
            return self._last((token,), text + rest, "stop" if self._text.stopped else end, logprobs)
        return Step(self._number, (token,), text, None, logprobs)

    def fork(self) -> "Reply":
        """Another one that goes on from here by itself."""
        other = Reply(self._number, self.config, self._text.fork(), self._stop_ids, guide=self.guide.fork())
        other._until, other._count, other.finished = self._until, self._count, self.finished
        return other

    def _over(self) -> Literal["length", "time"] | None:
        if self._count >= self.config.max_tokens:
            return "length"
        return "time" if perf_counter() >= self._until else None

    def _last(self, ids: tuple[int, ...], text: str, finish: Finish, logprobs: tuple[Said, ...] = ()) -> Step:
        self.finished = True
        self.guide = FREE
        return Step(self._number, ids, text, finish, logprobs)


def replies(
    count: int,
    configs: Sequence[GenerationConfig],
    decode: Decode,
    stop_ids: frozenset[int],
    began: float = math.inf,
    guides: Sequence[Guide] = (),
) -> list[Reply]:
    """The replies of so many rows at their beginnings; see `generate`. Raises InputError for a wrong number of configs or guides."""
    if len(configs) != count:
        raise InputError(f"{len(configs)} of them for {count} rows", item="configs")
    led = guides or [FREE] * len(configs)
    if len(led) != len(configs) or any(
        (guide is FREE) != (config.constraint.kind == "any") for guide, config in zip(led, configs, strict=True)
    ):
        raise InputError("one that fits is needed for every constraint; guide_of makes it", item="guides")
    return [Reply(row, config, TextStream(decode, config.stop), stop_ids, began, led[row]) for row, config in enumerate(configs)]


def _said(logits: Float[Tensor, "b v"], sampler: Sampler, rows: Sequence[Reply]) -> tuple[Int[Tensor, " b"], list[tuple[Said, ...]]]:
    """The next token of every row, and how likely it was; -1 where the logits are not finite (told with the ids: the host waits once)."""
    # Not as a decorator of the loop: a generator that is suspended must not leave its caller without gradients.
    with torch.no_grad():
        ids = sampler(masked(logits, [row.guide for row in rows])).masked_fill(~logits.amax(-1).isfinite(), -1)
        return ids, likelihoods(logits, ids, [0 if row.finished else int(row.config.logprobs) for row in rows])


def _scores(decoder: Speaker, hidden: Float[Tensor, "b d"]) -> Float[Tensor, "b v"]:
    with torch.no_grad():
        return decoder.logits(hidden)
