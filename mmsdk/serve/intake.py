"""Requests on their way to an engine's decoder: encoded and laid out, once, those who wait for the same kind of thing together."""

from collections.abc import Sequence
from dataclasses import replace

from mmsdk.answer import Tokens
from mmsdk.answering import guided
from mmsdk.errors import InputError, MmsdkError, ModelError
from mmsdk.generate.constrain import FREE
from mmsdk.kv.memory import DenseMemory, PagedMemory
from mmsdk.pipeline import Pipeline
from mmsdk.recall import SIGHTS, Recall, Sights
from mmsdk.seeing import parted
from mmsdk.serve.job import Job
from mmsdk.stages import Clock, Row, device_of, lay_out, legible

__all__ = ["Intake"]


class Intake:
    """What has been looked at and has not ended: prompts in front of the decoder with their blocks' keys, and what is wrong with others."""

    def __init__(self, pipe: Pipeline, paged: bool) -> None:
        """Keys are made where blocks are found again by them (`paged`)."""
        self._pipe = pipe
        self._recall = Recall(PagedMemory() if paged else DenseMemory(), Sights(SIGHTS))
        self._ready: dict[int, tuple[Row, list[bytes]]] = {}
        self._wrong: dict[int, MmsdkError] = {}

    def __contains__(self, number: int) -> bool:
        """Whether this request has been looked at."""
        return number in self._ready or number in self._wrong

    def __getitem__(self, number: int) -> tuple[Row, list[bytes]]:
        """The prompt of a request that nothing is wrong with, and its keys."""
        return self._ready[number]

    def wrong(self, number: int) -> tuple[MmsdkError, ...]:
        """What is wrong with a request, if anything is."""
        return (self._wrong[number],) if number in self._wrong else ()

    def forget(self, number: int) -> None:
        """It has ended."""
        self._ready.pop(number, None)
        self._wrong.pop(number, None)

    def clear(self) -> None:
        """All have."""
        self._ready.clear()
        self._wrong.clear()

    def look_at(self, jobs: Sequence[Job]) -> None:
        """Encode and lay out these requests, in one pass of the encoder those that are `alike` the first one, which is among them.

        What is wrong with one of them is kept for it, and the others go on.
        """
        first = jobs[0]
        sound = [job for job in jobs if alike(job, first) and self._led(job)]
        if not sound:
            return
        vlm, adapters, numbers = self._pipe.vlm, self._pipe.adapters, [job.number for job in sound]
        recall, room, clock = replace(self._recall, tenant=first.tenant), first.config.max_tokens, Clock(device_of(vlm))
        try:
            own, worn = adapters.worn(first.adapter, 1), adapters.worn(first.adapter, len(sound))
            laid = lay_out(vlm, self._pipe.compression, [job.question for job in sound], room, clock, recall=recall, worn=worn)
        except (MmsdkError, RuntimeError, ValueError, OSError, MemoryError) as error:
            # of several it may be one alone that it is in
            for job in sound if len(sound) > 1 else ():
                self.look_at([job])
            if len(sound) == 1:
                self._wrong[numbers[0]] = error if isinstance(error, MmsdkError) else ModelError(f"its prompt could not be made: {error!r}")
            return
        looked, starved = parted(legible(laid, list(laid.rows.values())))
        for place, wrong in (laid.errors | starved).items():
            self._wrong[numbers[place]] = wrong.at(None) if isinstance(wrong, InputError) else wrong
        for place, keys in zip(laid.rows, laid.keys, strict=True):
            if place in looked:
                row, job = looked[place], sound[place]
                self._ready[job.number] = row, keys
                job.worn, job.heard, job.sights = own, row.words, row.sights
                job.tokens = Tokens(row.visual, row.kept, len(row.embeddings))

    def _led(self, job: Job) -> bool:
        """Whether it has a guide to its form, or needs none."""
        try:
            if job.voice.guide is FREE:
                job.voice.lead(guided(self._pipe.vlm, job.config))
        except MmsdkError as error:
            self._wrong[job.number] = error
            return False
        return True


def alike(one: Job, other: Job) -> bool:
    """Whether two go through the encoder together: of one tenant, with the same adapters, and room for as long an answer."""
    return (one.tenant, one.adapter, one.config.max_tokens) == (other.tenant, other.adapter, other.config.max_tokens)
