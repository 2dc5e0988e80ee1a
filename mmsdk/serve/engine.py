"""Continuous batching: requests come and go at every token, and share one pool of blocks (Orca, OSDI 2022; PagedAttention, 2309.06180).

    engine = Engine(pipe, rows=8)
    number = engine.submit("photo.jpg", "What is it?", GenerationConfig(max_tokens=32))
    while engine.busy:
        for event in engine.step():
            print(event.number, event.text)

A step is schedule, run, postprocess: admit who has room, one token for everyone who speaks, about `chunk` tokens of prompts for those
who are still read (chunked prefill, Sarathi, arXiv 2308.16369), then see who has ended. Where blocks run out, the latest to be admitted is
set aside: its blocks are freed, and its prompt and what it has said are read again when there is room. Its text and its draws go on as if
nothing had been. No request waits for ever: tenants are admitted in turn, the requests of one in order, and none overtakes.

What a request remembers is what the pipeline's memory says (`kv`): exact blocks, blocks in which older tokens take fewer bits, or a policy
that lets go of tokens (`mmsdk.serve.pools`); of a model that remembers in levels, those. Tokens that see one another, as those of a picture
do in Gemma 3 and all of a prompt in PaliGemma, are read in one piece, and may be more than a chunk. Where reading again would not give the
same, whoever is admitted has room to the end of its answer, and nobody is set aside.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.adapters import AdapterSpec
from mmsdk.answer import Tokens
from mmsdk.answering import guided
from mmsdk.decoder.adapted import Stack, wear
from mmsdk.decoder.prefill import prefill_into
from mmsdk.decoder.sight import together
from mmsdk.decoder.transformer import Decoder
from mmsdk.doors import door
from mmsdk.encoded import Given
from mmsdk.errors import InputError, MmsdkError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.constrain import FREE, Guide
from mmsdk.kv.memory import DenseMemory, PagedMemory, RoundedMemory
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.shape import Shape
from mmsdk.kv.types import KVCache
from mmsdk.pipeline import Pipeline
from mmsdk.prompt import Prompt
from mmsdk.recall import Recall, Sights
from mmsdk.seeing import parted
from mmsdk.serve.job import Event, Job, Outcome, Reading, laid_with
from mmsdk.serve.pools import pool_of
from mmsdk.stages import Clock, Row, device_of, lay_out, legible
from mmsdk.vision.values import shown, whole

__all__ = ["Engine", "Event", "Outcome"]

_SIGHTS = 128 * 2**20


class Engine:
    """Requests over one pipeline's model. Not safe between threads: one calls `step`, and hands requests over to it."""

    @door
    def __init__(self, pipe: Pipeline, *, rows: int = 8, chunk: int = 256, tokens: int = 0) -> None:
        """At most `rows` requests at one time, and a pool for so many `tokens` of them all: by default 1,024 each, and the model's context.

        Raises InputError for a size below 1, where the pipeline compresses inside the decoder, and where its memory does not fit its model.
        """
        for name, size in (("rows", rows), ("chunk", chunk)):
            if not whole(size, 1):
                raise InputError(f"it is {shown(size)}, expected a whole number of at least 1", item=name)
        if pipe.compression.inside_decoder:
            raise InputError("an engine reads prompts in chunks, and a method inside the decoder needs them whole", item="compress")
        if pipe.compression.proportional:
            raise InputError("an engine's pages do not keep what tokens weigh; leave out proportional", item="compress")
        self._pipe, self._rows, self._chunk = pipe, rows, chunk
        decoder, config = pipe.vlm.decoder, pipe.vlm.decoder.config
        if config.sees != "before" and isinstance(pipe.recall.memory, RoundedMemory):
            raise InputError("a memory in fewer bits reads prompts in parts, and this model reads them whole; choose paged", item="kv")
        shape = Shape(config.layers, config.kv_heads, config.entry, decoder.dtype, device_of(pipe.vlm), config.levels)
        self._pool = pool_of(pipe.recall.memory, shape, rows, tokens or max(pipe.vlm.context, 1024 * rows), chunk)
        # Whether whoever is admitted is promised room to the end of its answer.
        self._promises = config.sees != "before" or not self._pool.rereads
        self._recall = Recall(PagedMemory() if self._pool.page else DenseMemory(), Sights(_SIGHTS))
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._prepared: dict[int, tuple[Row, list[bytes]]] = {}
        self._reading: list[Reading] = []
        self._speaking: list[Job] = []
        # The rows of those who speak, in their order; one without tokens where nobody does.
        self._cache = self._pool.empty()
        self._worn: tuple[tuple[Stack, ...], Decoder] = (), decoder
        self._number = 0

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._speaking or self._reading or any(self._waiting.values()))

    @property
    def held(self) -> int:
        """Blocks of requests, over all layers; what is only remembered of past prompts does not count."""
        return self._pool.held(self._caches)

    @property
    def utilisation(self) -> float:
        """The share of the slots in blocks of those who speak that hold a token; 1 where there are no blocks."""
        return self._cache.utilisation if isinstance(self._cache, PagedCache) else 1.0

    @door
    def submit(
        self,
        media: Given | Sequence[Given],
        question: str | Prompt,
        config: GenerationConfig = GenerationConfig(),
        tenant: str = "",
        adapter: AdapterSpec = "",
        guide: Guide = FREE,
    ) -> int:
        """Take a request; its number. Nothing is looked at yet: what is wrong with it ends it, alone, in a later step.

        A prompt in the place of the question, behind no media, is a conversation. `adapter` is one of the pipeline's, or several; `guide`
        that of the form which `config` asks for, where it has been compiled already.
        """
        self._number += 1
        vlm = self._pipe.vlm
        job = Job(self._number, (media, question), config, tenant, vlm.tokenizer.decode, vlm.stop_ids, adapter)
        job.lead(guide)
        self._waiting.setdefault(tenant, deque()).append(job)
        return job.number

    def cancel(self, number: int) -> bool:
        """End a request now and free what it holds; whether it was still there. It gives no event any more."""
        for queue in self._waiting.values():
            for job in [one for one in queue if one.number == number]:
                queue.remove(job)
                self._prepared.pop(number, None)
                return True
        for one in [one for one in self._reading if one.job.number == number]:
            self._reading.remove(one)
            self._pool.release(one.cache)
            self._prepared.pop(number, None)
            return True
        for job in [one for one in self._speaking if one.number == number]:
            self._drop([job])
            return True
        return False

    def step(self) -> list[Event]:
        """Go on by one token for everyone who speaks, and by one chunk for those who are read.

        What breaks it off, be it Ctrl-C, ends all requests: nobody can tell how far each had come.
        """
        with ExitStack() as broken_off, torch.no_grad():
            broken_off.callback(self.close)
            events = self._admit()
            events += self._decode()
            events += self._read()
            broken_off.pop_all()
        return events

    def drain(self) -> dict[int, Outcome]:
        """Step until nothing is left to do; the outcomes by number."""
        found, outcomes = dict[int, list[Event]](), dict[int, Outcome]()
        while self.busy:
            for event in self.step():
                events = found.setdefault(event.number, [])
                events.append(event)
                if event.finish is not None:
                    outcomes[event.number] = Outcome.of(events, event.finish)
        return outcomes

    def close(self) -> None:
        """End all requests and free everything; the engine can be used again."""
        self._waiting.clear()
        for one in self._reading:
            self._pool.release(one.cache)
        self._reading.clear()
        self._drop(self._speaking)
        self._prepared.clear()
        self._pool.clear()

    @property
    def _caches(self) -> list[KVCache]:
        """Those of everyone who is read or speaks."""
        return [self._cache, *(one.cache for one in self._reading)]

    def _admit(self) -> list[Event]:
        """Begin to read those whose turn it is, as long as the pool has room for all of what each has to be told.

        Who asks what is being read for another of its tenant waits for that; other tenants do not.
        """
        events, twins = list[Event](), set[str]()
        while len(self._reading) + len(self._speaking) < self._rows and (tenant := self._turn(twins)) is not None:
            job = self._waiting[tenant][0]
            problem = self._look_at(job)
            if problem is not None:
                events.append(Event(job.number, (), "", problem))
            elif self._being_read(job):
                twins.add(tenant)
                continue
            elif not self._begin(job):
                break
            self._waiting[tenant].popleft()
            self._waiting.move_to_end(tenant)
        return events

    def _turn(self, but: Collection[str]) -> str | None:
        """The tenant whose turn it is among those who wait."""
        for tenant in [tenant for tenant, queue in self._waiting.items() if not queue]:
            del self._waiting[tenant]
        return next((tenant for tenant in self._waiting if tenant not in but), None)

    def _look_at(self, job: Job) -> MmsdkError | None:
        """Encode and lay out a request, once; what is wrong with it."""
        if job.number in self._prepared:
            return None
        vlm, recall = self._pipe.vlm, replace(self._recall, tenant=job.tenant)
        try:
            if job.config.num_beams > 1:
                told = f"{job.config.num_beams} beams of a request change places at every token, and an engine gives each request one row"
                raise InputError(f"{told}; ask the pipeline, or set num_beams 1", item="num_beams")
            if job.guide is FREE:
                job.lead(guided(vlm, job.config))
            job.worn, clock = self._pipe.adapters.worn(job.adapter, 1), Clock(device_of(vlm))
            ready = lay_out(vlm, self._pipe.compression, [job.question], job.config.max_tokens, clock, recall=recall, worn=job.worn)
        except MmsdkError as error:
            return error
        _, starved = parted(legible(ready, list(ready.rows.values())))
        for wrong in (*ready.errors.values(), *starved.values()):
            return wrong.at(None) if isinstance(wrong, InputError) else wrong
        (row,), (keys,) = ready.rows.values(), ready.keys
        most = len(row.embeddings) + job.config.max_tokens
        if most > self._pool.tokens:
            told = f"prompt and answer may take {most} tokens, the engine holds {self._pool.tokens}"
            return InputError(f"{told}; lower max_tokens, or give it more tokens", item="prompt")
        self._prepared[job.number] = row, keys
        job.tokens, job.heard = Tokens(row.visual, row.kept, len(row.embeddings)), row.words
        return None

    def _being_read(self, job: Job) -> bool:
        """Whether one who is read now brings the next block of this prompt: several answers to one question share what is read once."""
        row, keys = self._prepared[job.number]
        searched = self._searched(keys, len(row.embeddings) + len(job.said))
        place = self._pool.known(searched)
        return any(searched[place : place + 1] == one.keys[place : place + 1] != [] for one in self._reading)

    def _begin(self, job: Job) -> bool:
        """Give a job its room and begin to read it; not where there is none, with some to go on for everyone who is there."""
        row, keys = self._prepared[job.number]
        laid = laid_with(self._pipe.vlm.decoder, row, job.said)
        tokens, upto = len(laid.embeddings), len(row.embeddings) + job.config.max_tokens if self._promises else len(laid.embeddings) + 1
        found = self._pool.begin(self._searched(keys, tokens), tokens, upto, self._ahead(), self._caches)
        for cache, done in found:
            if not job.said:
                job.tokens = replace(job.tokens, recalled=done)
            whole = together(self._pipe.vlm.decoder.config.sees, laid.spans) or self._pool.pieces(tokens)
            self._reading.append(Reading(job, laid, keys, cache, done, whole))
        return bool(found)

    def _searched(self, keys: Sequence[bytes], tokens: int) -> Sequence[bytes]:
        """The keys of the blocks before a prompt's last token: someone waits for the output of that."""
        return keys[: (tokens - 1) // self._pool.page] if self._pool.page else ()

    def _ahead(self) -> list[int]:
        """The tokens that everyone who is there has to find room for: the next one, or all that were promised."""
        left = [job.config.max_tokens - len(job.said) for job in self._speaking]
        left += [one.left + one.job.config.max_tokens - len(one.job.said) for one in self._reading]
        return left if self._promises else [1] * len(left)

    def _decode(self) -> list[Event]:
        """One token for everyone who speaks."""
        self._make_room()
        if not self._speaking:
            return []
        decoder = self._speaker()
        ids = torch.tensor([[job.said[-1]] for job in self._speaking], device=self._cache.position.device)
        hidden: Tensor = decoder(decoder.embed(ids), self._cache.position[:, None], self._cache)
        events = self._say(self._speaking, hidden[:, -1])
        self._drop([job for job, event in zip(self._speaking, events, strict=True) if event.finish is not None])
        return events

    def _read(self) -> list[Event]:
        """About a chunk of the prompts that are read, the earliest first; whoever is through says its first token."""
        events, budget = list[Event](), self._chunk
        while self._reading and budget > 0:
            one = self._reading[0]
            count = min(one.upcoming(budget, alone=budget == self._chunk), self._pool.most)
            if not count:
                break
            run = prefill_into(one.job.worn.decoder(self._pipe.vlm.decoder, [0]), [one.next(count)], (), one.cache, last=1)
            one.done, budget = one.done + count, budget - count
            if one.left:
                break
            self._reading.pop(0)
            self._pool.learn(one.cache, one.keys)
            (event,) = self._say([one.job], run.hidden[:, -1])
            events.append(event)
            if event.finish is None:
                self._join(one)
            else:
                self._pool.release(one.cache)
                self._prepared.pop(one.job.number)
        return events

    def _speaker(self) -> Decoder:
        """The decoder of those who speak, in their order; where they have adapters, made anew when others speak."""
        stacks = tuple(stack for job in self._speaking for stack in job.worn.stacks or ((),))
        if stacks != self._worn[0]:
            self._worn = stacks, wear(self._pipe.vlm.decoder, stacks)
        return self._worn[1]

    def _say(self, jobs: Sequence[Job], hidden: Float[Tensor, "b d"]) -> list[Event]:
        logits = self._pipe.vlm.decoder.logits(hidden)
        likeliest = logits.argmax(-1, keepdim=True)
        # What is no number counts as the largest. The host waits once for all of them.
        best = likeliest.masked_fill(~logits.gather(-1, likeliest).isfinite(), -1)[:, 0].tolist()
        return [job.say(token, row[None]) for job, token, row in zip(jobs, best, logits, strict=True)]

    def _make_room(self) -> None:
        """Room for a token of everyone who speaks: what is only remembered goes first, then the latest who was admitted."""
        while self._speaking and not self._pool.goes_on(self._cache):
            if self._reading:
                one = self._reading.pop()
                self._pool.release(one.cache)
                self._wait_again(one.job)
            else:
                self._set_aside(self._speaking[-1])

    def _set_aside(self, job: Job) -> None:
        """Free the blocks of one who speaks, to be read again; the full ones of its prompt stay for as long as nobody needs them."""
        self._drop([job], forget=False)
        self._wait_again(job)

    def _wait_again(self, job: Job) -> None:
        self._waiting.setdefault(job.tenant, deque()).appendleft(job)
        self._waiting.move_to_end(job.tenant, last=False)

    def _join(self, one: Reading) -> None:
        self._cache = self._pool.joined([self._cache, one.cache] if self._speaking else [one.cache])
        self._speaking.append(one.job)

    def _drop(self, jobs: Sequence[Job], forget: bool = True) -> None:
        """Take these out of those who speak and free their blocks, and their adapters where nobody else has them."""
        if not jobs:
            return
        staying = [place for place, job in enumerate(self._speaking) if job not in jobs]
        self._cache = self._pool.picked(self._cache, staying)
        self._speaking = [self._speaking[place] for place in staying]
        self._worn = (), self._pipe.vlm.decoder
        for job in jobs if forget else ():
            self._prepared.pop(job.number)
