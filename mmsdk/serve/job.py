"""One request on its way through an engine: what was asked, what the decoder is to be told, what has been said."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.adapters import AdapterSpec, Worn
from mmsdk.answer import Sight, Tokens
from mmsdk.decoder.prefill import Laid
from mmsdk.decoder.spans import Span
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import MmsdkError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.logprobs import Said
from mmsdk.generate.loop import Generated, Reply
from mmsdk.generate.text import Decode, TextStream
from mmsdk.kv.types import KVCache
from mmsdk.serve.voice import voice_of
from mmsdk.stages import Question, Row

__all__ = ["Event", "Finish", "Job", "Outcome", "Reading", "laid_with"]

Finish = Literal["stop", "length", "time", "cancelled"] | MmsdkError


@dataclass(frozen=True, slots=True)
class Event:
    """A request went on: the tokens it gained, the text that these set free, and why it ends here, if it does.

    `tokens` are its counts so far, all 0 where it was never looked at; `logprobs` are those of `ids`, where they were asked for. With the
    last event come `sights`, what the model saw of each visual input, and `found`, all answers of a search by beams with their scores, the
    best first, which is what `ids` and `text` say.
    """

    number: int
    ids: tuple[int, ...]
    text: str
    finish: Finish | None = None
    tokens: Tokens = Tokens()
    logprobs: tuple[Said, ...] = ()
    sights: tuple[Sight, ...] = ()
    found: tuple[Generated, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The whole of a request; `sights` and `found` as in `Event`. Where `finish` is an error, the text is what it said before."""

    text: str
    ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[Said, ...] = ()
    sights: tuple[Sight, ...] = ()
    found: tuple[Generated, ...] = ()

    @staticmethod
    def of(events: Sequence[Event], finish: Finish) -> "Outcome":
        """What was said in so many events."""
        ids = tuple(token for event in events for token in event.ids)
        logprobs = tuple(one for event in events for one in event.logprobs)
        return Outcome("".join(event.text for event in events), ids, finish, logprobs, events[-1].sights, events[-1].found)


class Job:
    """A request that an engine has taken. Its voice goes on where it was, however often it is set aside.

    `heard` are the ids of its prompt's words, `worn` the adapters that it asks for, and `sights` what was seen of its visual inputs, known
    when it has been looked at; `said` is what is to be read behind the prompt, where it was set aside.
    """

    def __init__(
        self,
        number: int,
        question: Question,
        config: GenerationConfig,
        tenant: str,
        decode: Decode,
        stop_ids: frozenset[int],
        adapter: AdapterSpec = "",
    ) -> None:
        self.number = number
        self.question = question
        self.config = config
        self.tenant = tenant
        self.adapter = adapter
        self.worn = Worn()
        self.heard: Sequence[int] = ()
        self.sights: tuple[Sight, ...] = ()
        self.said: Sequence[int] = ()
        self.tokens = Tokens()
        self.voice = voice_of(Reply(number, config, TextStream(decode, config.stop), stop_ids, perf_counter()), len(stop_ids))
        self._begun = False

    @property
    def width(self) -> int:
        """The most rows that it has at one time."""
        return int(self.config.num_beams)

    @property
    def rows(self) -> int:
        """Those that it has now."""
        return len(self.voice.last)

    @property
    def left(self) -> int:
        """The most tokens that each of its rows may still take."""
        return self.config.max_tokens - self.tokens.generated

    def say(self, likeliest: Sequence[int], logits: Float[Tensor, "r v"]) -> Event:
        """Take the next token of each of its rows; see `Voice`. Of a search nothing is told before its end."""
        told = self.voice.say(likeliest, logits, self.heard)
        self.tokens = replace(self.tokens, generated=len(told.ids) if told.found else self.tokens.generated + len(told.ids))
        # Models begin with the space between prompt and answer, which is no part of the answer.
        text = told.text if self._begun else told.text.lstrip()
        self._begun = self._begun or bool(text)
        sights = () if told.finish is None else self.sights
        return Event(self.number, told.ids, text, told.finish, self.tokens, told.logprobs, sights, told.found)

    def set_aside(self) -> None:
        """Its rows are gone; it is to be read again."""
        self.said = tuple(self.voice.set_aside())


@dataclass(slots=True)
class Reading:
    """A job whose prompt, and what it had said when it was set aside, goes through the decoder chunk by chunk.

    Each run of tokens that is `whole` goes through in one piece.
    """

    job: Job
    laid: Laid
    keys: Sequence[bytes]
    cache: KVCache
    done: int
    whole: tuple[range, ...] = ()

    @property
    def left(self) -> int:
        """Tokens that the cache does not hold yet."""
        return len(self.laid.embeddings) - self.done

    def upcoming(self, budget: int, alone: bool) -> int:
        """How many tokens go through next: all, where they are at most a quarter more than `budget`, else so many, if it is read `alone`.

        Every pass reads all weights: a short rest is not worth one of its own, and who would be cut waits for the next step. No run that is
        `whole` is cut: the tokens in front of it go first, and where there are none, all of it.
        """
        if self.left <= budget + budget // 4:
            return self.left
        if not alone:
            return 0
        stop = self.done + budget
        while cut := [run.start for run in self.whole if run.start < stop < run.stop]:
            stop = min(cut)
        if stop > self.done:
            return stop - self.done
        stop = self.done + 1
        while cut := [run.stop for run in self.whole if run.start < stop < run.stop]:
            stop = max(cut)
        return stop - self.done

    def next(self, count: int) -> Laid:
        """The next so many of them."""
        return self.laid.part(self.done, self.done + count)


def laid_with(decoder: Decoder, row: Row, said: Sequence[int]) -> Laid:
    """A prompt and the tokens said after it, in front of the decoder."""
    words = decoder.embed(torch.tensor([list(said)], dtype=torch.int64, device=row.embeddings.device))[0].to(row.embeddings.dtype)
    embeddings = torch.cat([row.embeddings, words])
    behind = row.positions[-1] + 1 + torch.arange(len(said), device=row.positions.device)
    deep = tuple(torch.cat([added, torch.zeros_like(words)]) for added in row.deep)
    turns = tuple(
        torch.cat([axes, (start + torch.arange(len(said), device=start.device)).expand(3, -1)], dim=1)
        for axes, start in zip(row.turns, row.following, strict=True)
    )
    following = tuple(start + len(said) for start in row.following)
    spans = row.spans or (Span(-1, (len(row.embeddings),)),)
    again = (Span(-1, (len(said),)),) if said else ()
    return Laid(embeddings, torch.cat([row.positions, behind]), (*spans, *again), deep, turns, following)
