"""Continuous batching: requests come and go at every token, and share one pool of blocks (Orca, OSDI 2022; PagedAttention, 2309.06180).

    engine = Engine(pipe, rows=8)
    number = engine.submit("photo.jpg", "What is it?", GenerationConfig(max_tokens=32))
    while engine.busy:
        for event in engine.step():
            print(event.number, event.text)

A step is schedule, run, postprocess: admit who has room, one token for everyone who speaks, about `chunk` tokens of prompts for those
who are still read (chunked prefill, Sarathi, arXiv 2308.16369), then see who has ended. Where blocks run out, the latest to be admitted is
set aside: its blocks are freed, and its prompt and what it has said are read again when there is room. Its text and its draws go on as if
nothing had been: in float32 to the token, in fewer bits but for the rounding of what is read in one piece and was said token by token. No
request waits for ever: tenants are admitted in turn, and share the chunks of prompts in turn; the requests of one go in order, and none
overtakes. The beams of a request are rows that share its prompt's blocks; a search that is set aside begins anew, for it has told nothing
yet.

What a request remembers is what the pipeline's memory says (`kv`): exact blocks, blocks in which older tokens take fewer bits, or a policy
that lets go of tokens (`mmsdk.serve.pools`); of a model that remembers in levels, those. Tokens that see one another, as those of a picture
do in Gemma 3 and all of a prompt in PaliGemma, are read in one piece, and may be more than a chunk. Where reading again would not give the
same, whoever is admitted has room to the end of its answer, and nobody is set aside.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate, islice, zip_longest
from types import TracebackType

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.adapters import AdapterSpec
from mmsdk.decoder.adapted import Stack, wear
from mmsdk.decoder.beside import Reads, Says, beside
from mmsdk.decoder.sight import together
from mmsdk.decoder.transformer import Decoder
from mmsdk.doors import door
from mmsdk.encoded import Given
from mmsdk.errors import InputError, MmsdkError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.constrain import FREE, Guide
from mmsdk.generate.sampling import likeliest
from mmsdk.kv.memory import RoundedMemory
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.shape import Shape
from mmsdk.kv.types import KVCache
from mmsdk.pipeline import Pipeline
from mmsdk.prompt import Prompt
from mmsdk.serve.intake import Intake
from mmsdk.serve.job import Event, Job, Outcome, Reading, laid_with
from mmsdk.serve.pools import pool_of
from mmsdk.stages import device_of
from mmsdk.vision.values import shown, whole

__all__ = ["Engine", "Event", "Outcome"]


class Engine:
    """Requests over one pipeline's model. Not safe between threads: one calls `step`, and hands requests over to it."""

    @door
    def __init__(self, pipe: Pipeline, *, rows: int = 8, chunk: int = 256, tokens: int = 0) -> None:
        """At most `rows` requests at one time, beams counted, and a pool for so many `tokens` of them all: by default 1,024 each, and the
        model's context.

        Raises InputError for a size that is no whole number or too small, where the pipeline compresses inside the decoder, and where its
        memory does not fit its model.
        """
        for name, size, least in (("rows", rows, 1), ("chunk", chunk, 1), ("tokens", tokens, 0)):
            if not whole(size, least):
                raise InputError(f"it is {shown(size)}, expected a whole number of at least {least}", item=name)
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
        self._intake = Intake(pipe, bool(self._pool.page))
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._reading: list[Reading] = []
        self._speaking: list[Job] = []
        # The rows of those who speak, in their order; one without tokens where nobody does.
        self._cache = self._pool.empty()
        # In which step something of a tenant's prompts was last read, of those with prompts that are read now.
        self._turns: dict[str, int] = {}
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
        that of the form which `config` asks for, where it has been compiled already. Raises InputError where `config` is no such thing.
        """
        if not isinstance(config, GenerationConfig):
            raise InputError(f"it is {shown(config)}, expected a GenerationConfig", item="config")
        self._number += 1
        vlm = self._pipe.vlm
        job = Job(self._number, (media, question), config, tenant, vlm.tokenizer.decode, vlm.stop_ids, adapter)
        job.voice.lead(guide)
        self._waiting.setdefault(tenant, deque()).append(job)
        return job.number

    def cancel(self, number: int) -> bool:
        """End a request now and free what it holds; whether it was still there. It gives no event any more."""
        for queue in self._waiting.values():
            for job in [one for one in queue if one.number == number]:
                queue.remove(job)
                self._intake.forget(number)
                return True
        for one in [one for one in self._reading if one.job.number == number]:
            self._reading.remove(one)
            self._pool.release(one.cache)
            self._intake.forget(number)
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
            self._make_room()
            events += self._go_on(*self._pass())
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
        # who was about to join them when something went wrong has blocks there, too
        self._pool.release(self._cache)
        self._cache = self._pool.empty()
        self._intake.clear()
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
        while self._taken < self._rows and (tenant := self._turn(twins)) is not None:
            job = self._waiting[tenant][0]
            problems = self._wrong_with(job)
            if problems:
                events.append(Event(job.number, (), "", problems[0]))
                self._intake.forget(job.number)
            elif self._being_read(job):
                twins.add(tenant)
                continue
            elif self._taken + job.width > self._rows or not self._begin(job):
                break
            self._waiting[tenant].popleft()
            self._waiting.move_to_end(tenant)
        return events

    @property
    def _taken(self) -> int:
        """Rows of everyone who is read or speaks, as many as they may come to be."""
        return sum(job.width for job in (*self._speaking, *(one.job for one in self._reading)))

    def _turn(self, but: Collection[str]) -> str | None:
        """The tenant whose turn it is among those who wait."""
        for tenant in [tenant for tenant, queue in self._waiting.items() if not queue]:
            del self._waiting[tenant]
        return next((tenant for tenant in self._waiting if tenant not in but), None)

    def _wrong_with(self, job: Job) -> tuple[MmsdkError, ...]:
        """What is wrong with a request, which is looked at the first time, if anything is."""
        most = min(self._rows, self._pipe.vlm.decoder.config.vocabulary)
        if job.width > most:
            told = f"{job.width} beams are as many rows, of which the engine has {most}"
            return (InputError(f"{told}; ask for fewer, or give it more rows", item="num_beams"),)
        if job.number not in self._intake:
            self._intake.look_at([job, *self._next(job)])
        for wrong in self._intake.wrong(job.number):
            return (wrong,)
        tokens = self._most(job)
        if tokens > self._pool.tokens:
            told = f"prompt and answer may take {tokens} tokens, the engine holds {self._pool.tokens}"
            return (InputError(f"{told}; lower max_tokens, or give it more tokens", item="prompt"),)
        return ()

    def _next(self, first: Job) -> list[Job]:
        """Whose turn comes after the first one's, as many as there are rows for."""
        turns = (job for turn in zip_longest(*self._waiting.values()) for job in turn if job is not None and job is not first)
        rest = islice(turns, max(0, self._rows - self._taken - first.width))
        return [job for job in rest if job.number not in self._intake and job.width <= self._rows]

    def _most(self, job: Job) -> int:
        """The tokens that it may take. Beams share what is full of the prompt in exact blocks, and each has begun blocks of its own."""
        prompt, answer = len(self._intake[job.number][0].embeddings), job.config.max_tokens
        if job.width == 1 or self._promises:
            return job.width * (prompt + answer)
        return prompt + self._pool.page + job.width * (answer + 2 * self._pool.page)

    def _being_read(self, job: Job) -> bool:
        """Whether one who is read now brings the next block of this prompt: several answers to one question share what is read once."""
        row, keys = self._intake[job.number]
        searched = self._searched(keys, len(row.embeddings) + len(job.said))
        place = self._pool.known(searched)
        return any(searched[place : place + 1] == one.keys[place : place + 1] != [] for one in self._reading)

    def _begin(self, job: Job) -> bool:
        """Give a job its room and begin to read it; not where there is none, with some to go on for everyone who is there."""
        row, keys = self._intake[job.number]
        laid = laid_with(self._pipe.vlm.decoder, row, job.said)
        tokens = len(laid.embeddings)
        # beside the first row, a block for each
        upto = self._most(job) if self._promises else tokens + 1 + (job.width - 1) * self._pool.page
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
        if not self._promises:
            return [1] * self._taken
        # of beams all that they may ever take: they share it with one another, and nobody counts for how long
        left = [self._most(job) if job.width > 1 else job.left for job in self._speaking]
        return left + [self._most(one.job) - one.done for one in self._reading]

    def _pass(self) -> tuple[list[Float[Tensor, "_ d"]], list[Reading]]:
        """One token for everyone who speaks, and about a chunk of the prompts that are read.

        Hidden states of all rows that speak, then of each prompt that is through, and these prompts, which still are among those read.
        """
        plain, speaker = self._pipe.vlm.decoder, self._speaker()
        parts: list[tuple[Decoder, Reads | Says]] = []
        if self._speaking:
            ids = torch.tensor([[token] for job in self._speaking for token in job.voice.last], device=self._cache.position.device)
            parts.append((speaker, Says(ids, self._cache)))
        through, wanted = list[Reading](), [True] * len(parts)
        for one, count in self._upcoming():
            parts.append((one.job.worn.decoder(plain, [0]), Reads(one.next(count), one.cache)))
            one.done += count
            wanted.append(not one.left)
            through += [] if one.left else [one]
        together = [part for decoder, part in parts if decoder is plain]
        found = iter(beside(plain, together))
        hidden = [next(found) if decoder is plain else part.alone(decoder) for decoder, part in parts]
        return [rows for rows, asked in zip(hidden, wanted, strict=True) if asked], through

    def _upcoming(self) -> list[tuple[Reading, int]]:
        """Who is read next, and how many tokens: first the tenant that has waited longest for its turn, and of one the earliest prompt."""
        found, budget = list[tuple[Reading, int]](), self._chunk
        self._turns = {one.job.tenant: self._turns.get(one.job.tenant, 0) for one in self._reading}
        now = 1 + max(self._turns.values(), default=0)
        for one in sorted(self._reading, key=lambda one: self._turns[one.job.tenant]):
            count = min(one.upcoming(budget, alone=budget == self._chunk), self._pool.most)
            if not count:
                break
            found, budget = [*found, (one, count)], budget - count
            self._turns[one.job.tenant] = now
            if budget <= 0 or count < one.left:
                break
        return found

    def _go_on(self, hidden: Sequence[Float[Tensor, "_ d"]], through: Sequence[Reading]) -> list[Event]:
        """Who speaks, and whose prompt is through, says a token; who has ended leaves."""
        if not hidden:
            return []
        rows, speaking = [job.rows for job in self._speaking], list(self._speaking)
        jobs = [*speaking, *(one.job for one in through)]
        for one in through:
            self._pool.learn(one.cache, one.keys)
        events = self._say(jobs, [*rows, *[1] * len(through)], torch.cat(list(hidden)))
        going = [event.finish is None for event in events]
        self._place(rows, going[: len(rows)])
        for one, goes in zip(through, going[len(rows) :], strict=True):
            self._reading.remove(one)
            if goes:
                self._join(one)
            else:
                self._pool.release(one.cache)
                self._intake.forget(one.job.number)
        # a search is silent up to its end
        return [event for event in events if event.ids or event.finish is not None]

    def _speaker(self) -> Decoder:
        """The decoder of those who speak, in their order; where they have adapters, made anew when others speak."""
        stacks = tuple(stack for job in self._speaking for stack in (job.worn.stacks or ((),)) * job.rows)
        if stacks != self._worn[0]:
            self._worn = stacks, wear(self._pipe.vlm.decoder, stacks)
        return self._worn[1]

    def _say(self, jobs: Sequence[Job], rows: Sequence[int], hidden: Float[Tensor, "b d"]) -> list[Event]:
        """The next tokens of jobs that have so many rows each."""
        logits = self._pipe.vlm.decoder.logits(hidden)
        first = likeliest(logits)[:, None]
        # What is no number counts as the largest. The host waits once for all of them.
        best = first.masked_fill(~logits.gather(-1, first).isfinite(), -1)[:, 0].tolist()
        ends = accumulate(rows)
        parts = [slice(end - count, end) for end, count in zip(ends, rows, strict=True)]
        return [job.say(best[part], logits[part]) for job, part in zip(jobs, parts, strict=True)]

    def _place(self, rows: Sequence[int], going: Sequence[bool]) -> None:
        """Of those who speak, with so many rows each at their last token, who does not go on leaves; beams take their places."""
        kept, first = list[int](), 0
        for job, count, goes in zip(self._speaking, rows, going, strict=True):
            kept += [first + place for place in job.voice.places] if goes else []
            first += count
        if kept != list(range(first)):
            self._cache = self._pool.picked(self._cache, kept)
        if not all(going):
            for job in [job for job, goes in zip(self._speaking, going, strict=True) if not goes]:
                self._speaking.remove(job)
                self._intake.forget(job.number)
            self._worn = (), self._pipe.vlm.decoder

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
        job.set_aside()
        self._wait_again(job)

    def _wait_again(self, job: Job) -> None:
        self._waiting.setdefault(job.tenant, deque()).appendleft(job)
        self._waiting.move_to_end(job.tenant, last=False)

    def _join(self, one: Reading) -> None:
        own = one.cache if one.job.rows == 1 else self._pool.picked(one.cache, one.job.voice.places)
        self._cache = self._pool.joined([self._cache, own] if self._speaking else [own])
        self._speaking.append(one.job)

    def _drop(self, jobs: Sequence[Job], forget: bool = True) -> None:
        """Take these out of those who speak and free their blocks, and their adapters where nobody else has them."""
        if not jobs:
            return
        whose = [job for job in self._speaking for _ in range(job.rows)]
        self._cache = self._pool.picked(self._cache, [place for place, job in enumerate(whose) if job not in jobs])
        self._speaking = [job for job in self._speaking if job not in jobs]
        self._worn = (), self._pipe.vlm.decoder
        for job in jobs if forget else ():
            self._intake.forget(job.number)
