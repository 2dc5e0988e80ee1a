"""What says the tokens of a request in an engine: one row of its batch, or the beams of a search, which are several and change places."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import MmsdkError
from mmsdk.generate.beams import Search, penalties_of, ways_of
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.constrain import Guide, masked
from mmsdk.generate.logprobs import Said, likelihoods
from mmsdk.generate.loop import Finish, Generated, Reply
from mmsdk.generate.penalties import Penalties
from mmsdk.generate.sampling import Sampler

__all__ = ["Searching", "Speaking", "Told", "Voice", "voice_of"]


@dataclass(frozen=True, slots=True)
class Told:
    """What a token brought: the ids, the text that they set free, why it ends, and of a search all answers, the best first."""

    ids: tuple[int, ...] = ()
    text: str = ""
    finish: Finish | None = None
    logprobs: tuple[Said, ...] = ()
    found: tuple[Generated, ...] = ()


@runtime_checkable
class Voice(Protocol):
    """Rows of an engine's batch, side by side. `heard` are the ids of the words of its prompt."""

    @property
    def guide(self) -> Guide:
        """What leads it to the form that its answer is to have."""
        ...

    @property
    def last(self) -> Sequence[int]:
        """The token that each of its rows said last, which the decoder is told next; none before the first."""
        ...

    @property
    def places(self) -> Sequence[int]:
        """Which of the rows that it had at its last token each of its rows goes on from."""
        ...

    def lead(self, guide: Guide) -> None:
        """Take the guide of its form, before its first token."""
        ...

    def say(self, likeliest: Sequence[int], logits: Float[Tensor, "r v"], heard: Sequence[int]) -> Told:
        """Take the next token of each row: the likeliest (-1 where the logits are not finite), or whichever its settings choose."""
        ...

    def set_aside(self) -> Sequence[int]:
        """Its rows are gone: what is to be read behind the prompt before it goes on."""
        ...


def voice_of(reply: Reply, ends: int) -> Voice:
    """One row, or as many as its settings ask for, in a model of which so many ids end an answer."""
    return Searching(reply, ends) if reply.config.num_beams > 1 else Speaking(reply)


class Speaking:
    """A row that says what is likeliest, or draws. Its sampler and its text go on where they were, however often it is set aside."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._said: list[int] = []
        self._sampler: Sampler | None = None

    @property
    def guide(self) -> Guide:
        """See `Voice`."""
        return self._reply.guide

    @property
    def last(self) -> Sequence[int]:
        """See `Voice`."""
        return self._said[-1:]

    @property
    def places(self) -> Sequence[int]:
        """See `Voice`."""
        return (0,)

    def lead(self, guide: Guide) -> None:
        """See `Voice`."""
        self._reply.guide = guide

    def say(self, likeliest: Sequence[int], logits: Float[Tensor, "r v"], heard: Sequence[int]) -> Told:
        """See `Voice`. What cannot be drawn ends it."""
        config, (token,) = self._reply.config, likeliest
        try:
            token = token if token < 0 or config.plain else self._chosen(config, logits, heard)
        except MmsdkError as error:
            return Told(finish=error)
        logprobs: tuple[Said, ...] = ()
        if config.logprobs and token >= 0:
            (logprobs,) = likelihoods(logits, torch.tensor([token], device=logits.device), [config.logprobs])
        step = self._reply.push(token, logprobs)
        self._said.extend(step.ids)
        return Told(step.ids, step.text, step.finish, step.logprobs)

    def set_aside(self) -> Sequence[int]:
        """See `Voice`."""
        return self._said

    def _chosen(self, config: GenerationConfig, logits: Float[Tensor, "1 v"], heard: Sequence[int]) -> int:
        if self._sampler is None:
            self._sampler = Sampler.of([config], logits.device, logits.shape[-1], [heard])
        return int(self._sampler(masked(logits, [self._reply.guide])))


class Searching:
    """The beams of a request (`mmsdk.generate.beams`), which tell nothing before all is found.

    One that is set aside begins anew behind its prompt, and finds what it would have found.
    """

    def __init__(self, reply: Reply, ends: int) -> None:
        self._reply, self._ends = reply, ends
        self._search = Search(0, reply, ends)
        self._penalties: tuple[Penalties, ...] = ()

    @property
    def guide(self) -> Guide:
        """See `Voice`."""
        return self._reply.guide

    @property
    def last(self) -> Sequence[int]:
        """See `Voice`."""
        return [beam.ids[-1] for beam in self._search.beams if beam.ids]

    @property
    def places(self) -> Sequence[int]:
        """See `Voice`."""
        return [beam.row for beam in self._search.beams]

    def lead(self, guide: Guide) -> None:
        """See `Voice`."""
        self._reply.guide = guide

    def say(self, likeliest: Sequence[int], logits: Float[Tensor, "r v"], heard: Sequence[int]) -> Told:
        """See `Voice`."""
        search, config = self._search, self._reply.config
        if not search.beams[0].ids:
            self._penalties = penalties_of([config], [heard], logits)
        search.step(list(chain.from_iterable(ways_of(logits, search.beams, self._penalties, [search]))))
        if search.done:
            found = search.found()
            return Told(found[0].ids, found[0].text, found[0].finish, found[0].logprobs, found)
        index, ids = torch.tensor([self.places, self.last], device=logits.device)
        self._penalties = tuple(one.select(index) for one in self._penalties)
        for one in self._penalties:
            one.count(ids)
        return Told()

    def set_aside(self) -> Sequence[int]:
        """See `Voice`."""
        self._search, self._penalties = Search(0, self._reply, self._ends), ()
        return ()
