"""The decoding loop: a token for every row, its text as it becomes certain, each row ending for itself.

    for step in generate(decoder, hidden, cache, configs, tokenizer.decode, stop_ids):
        print(step.text, end="")

Nothing runs ahead of what was asked for: a token is computed when the loop is asked for it. Closing the generator, or Ctrl-C, leaves
the cache with the tokens so far and nothing else behind.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.decoder.types import Speaker
from mmsdk.errors import InputError, ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.sampling import Sampler
from mmsdk.generate.text import Decode, TextStream
from mmsdk.kv.types import KVCache

__all__ = ["Finish", "Generated", "Reply", "Step", "collect", "generate"]

Finish = Literal["stop", "length"] | ModelError


@dataclass(frozen=True, slots=True)
class Step:
    """One row went on. `ids` are the tokens it gained (none for the one that only ends the text), `text` is what that set free.

    `finish` says why the row ends here, if it does: "stop" for an end-of-text id or a stop string, "length" for `max_tokens`, a
    ModelError where its logits are not finite. A row gives no step after that one.
    """

    row: int
    ids: tuple[int, ...]
    text: str
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Generated:
    """The whole of one row. The tokens of a stop string are among `ids`, its characters are not in `text`.

    Where `finish` is an error, the row's text is what it said before, and no answer.
    """

    text: str
    ids: tuple[int, ...]
    finish: Finish


def generate(
    decoder: Speaker,
    hidden: Float[Tensor, "b d"],
    cache: KVCache,
    configs: Sequence[GenerationConfig],
    decode: Decode,
    stop_ids: frozenset[int],
) -> Generator[Step, None, None]:
    """Text from what the decoder knows, as a stream: the steps of all rows, in order of time, then of rows.

    `hidden` is the decoder's output at the last real token of every row's prompt, `cache` holds that prompt, `configs` has one entry
    a row, and `decode` leaves special tokens out. Prompt ids are never looked at, so that any id may pad them. The last token said
    is not in the cache yet; once half the rows of a batch have ended, the others go on in a copy of it.
    A row whose logits are not finite ends by itself, with a ModelError as its finish. Raises InputError for a wrong number of configs.
    """
    if len(configs) != hidden.shape[0]:
        raise InputError(f"{len(configs)} of them for {hidden.shape[0]} rows", item="configs")
    sampler = Sampler.of(configs, hidden.device)
    rows = [Reply(row, config, TextStream(decode, config.stop), stop_ids) for row, config in enumerate(configs)]
    while True:
        ids = _next_ids(decoder, hidden, sampler)
        for row, token in zip(rows, ids.tolist(), strict=True):
            if not row.finished:
                yield row.push(token)
        going = [place for place, row in enumerate(rows) if not row.finished]
        if not going:
            return
        if 2 * len(going) <= len(rows):
            # Dropping rows copies the others: done at every halving, it costs less than running the finished ones on, unread.
            kept = torch.tensor(going, device=ids.device)
            cache, ids, sampler, rows = cache.select(kept), ids[kept], sampler.select(going), [rows[place] for place in going]
            decoder = decoder.among(going)
        hidden = _advance(decoder, ids, cache)


def collect(steps: Iterable[Step], rows: int) -> list[Generated]:
    """The whole of every row, from the stream that `generate` gives: streamed or not, the text is the same."""
    texts: list[list[str]] = [[] for _ in range(rows)]
    ids: list[list[int]] = [[] for _ in range(rows)]
    ends: dict[int, Finish] = {}
    for step in steps:
        texts[step.row].append(step.text)
        ids[step.row].extend(step.ids)
        if step.finish is not None:
            ends[step.row] = step.finish
    return [Generated("".join(texts[row]), tuple(ids[row]), ends[row]) for row in range(rows)]


class Reply:
    """What one row has said so far, and whether it is done."""

    __slots__ = ("_config", "_count", "_number", "_stop_ids", "_text", "finished")

    def __init__(self, number: int, config: GenerationConfig, text: TextStream, stop_ids: frozenset[int]) -> None:
        self._number = number
        self._config = config
        self._text = text
        self._stop_ids = stop_ids
        self._count = 0
        self.finished = False

    def push(self, token: int) -> Step:
        """Take the next token, -1 where its scores were not finite."""
        if token < 0:
            error = ModelError(f"the scores of the answer's token {self._count} are not finite; try dtype float32")
            return self._last((), self._text.finish(), error)
        if token in self._stop_ids:
            return self._last((), self._text.finish(), "stop")
        self._count += 1
        text = self._text.push(token)
        if self._text.stopped:
            return self._last((token,), text, "stop")
        if self._count == self._config.max_tokens:
            rest = self._text.finish()
            return self._last((token,), text + rest, "stop" if self._text.stopped else "length")
        return Step(self._number, (token,), text)

    def _last(self, ids: tuple[int, ...], text: str, finish: Finish) -> Step:
        self.finished = True
        return Step(self._number, ids, text, finish)


def _next_ids(decoder: Speaker, hidden: Float[Tensor, "b d"], sampler: Sampler) -> Int[Tensor, " b"]:
    """The next token of every row, -1 where the logits are not finite (told with the ids, so that the host waits once)."""
    # Not as a decorator of the loop: a generator that is suspended must not leave its caller without gradients.
    with torch.no_grad():
        logits = decoder.logits(hidden)
        return sampler(logits).masked_fill(~logits.amax(-1).isfinite(), -1)


def _advance(decoder: Speaker, ids: Int[Tensor, " b"], cache: KVCache) -> Float[Tensor, "b d"]:
    with torch.no_grad():
        embedded = decoder.embed(ids.clamp_min(0)[:, None])
        hidden = decoder(embedded, cache.position[:, None], cache)
        return hidden[:, -1]
