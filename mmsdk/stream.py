"""A stream without end: frames and words go into the decoder as they come, its memory stays bounded, and it can be asked at any time.

    stream = pipe.stream_session(kv="streaming:1024")
    stream.say("A camera above a table.")
    for seconds, frame in camera:
        stream.push(frame, seconds)
    stream.ask("What appeared first?")            # the stream stays as it was
    stream.ask("And then?", keep=True)            # question and answer become part of it

Where `mmsdk.watch` holds tokens of the encoder and reads them anew for every question, this holds the decoder's keys and values, which are
never computed again: what comes is read once, with all that is still remembered before it. When the memory is full, `kv` says what stays
(`mmsdk.kv.policy`), and positions close up behind what goes, so that a stream never leaves the context of its model. What comes together
is there in addition until it has been read, and so are question and answer while they last.

Frames go through the encoder in windows, each of which is a clip of its own to the model: times are counted anew in each. Where heads turn
along three axes (M-RoPE), a window stands on its grid behind what came before, as in a prompt, and words behind its last row or column.
What is held moves by one shift on all axes, which closes no gap inside: such models take policies that hold the last tokens.

One thread may push while others ask: a question looks at the stream as it is when it comes, frames that come meanwhile do not wait for it.
What changes the stream goes one after another: `push`, `say`, and `ask(keep=True)`, which holds off the others until it has been answered
or broken off.
"""

import dataclasses
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.adapters import Worn
from mmsdk.answer import Answer, Tokens
from mmsdk.answering import checked, guided
from mmsdk.bounded import Room, bounding, check_memory, check_model, usual
from mmsdk.compress import Compression
from mmsdk.decoder.prefill import Laid, prefill_into
from mmsdk.decoder.quantised import precision
from mmsdk.decoder.spans import Span
from mmsdk.doors import door
from mmsdk.encoded import Encoded, moved
from mmsdk.errors import InputError, MmsdkError
from mmsdk.exclusive import Exclusive
from mmsdk.generate.beams import search
from mmsdk.generate.config import EarlyStopping, GenerationConfig, Stop, stops
from mmsdk.generate.constrain import Constraint, Schema
from mmsdk.generate.loop import Generated, collect, generate
from mmsdk.kv.memory import DenseMemory
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.room import check_copies
from mmsdk.kv.shape import Shape
from mmsdk.models.types import VLM
from mmsdk.prompt import Ids, Layout, Prompt, written
from mmsdk.prompt import Span as Part
from mmsdk.stages import Clock, device_of, lay_out
from mmsdk.vision.intake import Source
from mmsdk.vision.types import Image, Video
from mmsdk.watch import Arrived, windowed
from mmsdk.window import alike, flat, ids, joined, parted, sight, within

__all__ = ["StreamSession"]


@dataclass(frozen=True, slots=True)
class State:
    """What a stream is at one time: the cache, the frames that wait for their window to be full, and the last window, for the layout.

    It never changes: what comes is read into a fork of the cache, which then stands in another state.
    `opened` says whether any window has been read; `visual` and `kept` are the visual tokens so far, in full and as they were read.
    `spoken` says whether any words of the stream have been.
    `words` are the ids of all words so far, each once, whether they are still held or not: what a repetition penalty looks at.
    """

    cache: PolicyCache
    arrived: Arrived
    seen: Encoded
    opened: bool = False
    visual: int = 0
    kept: int = 0
    words: frozenset[int] = frozenset()
    spoken: bool = False


class StreamSession:
    """One stream. `kv` says how much is held of it and what, `window` frames go through the encoder together, `worn` are its adapters.

    For several threads: `push`, `say` and `ask(keep=True)` wait for one another, and other questions for nothing. Each of the three raises
    InputError where its own thread is still amid one of them, from a handler of signals for one.
    Where `kv` is None it is `USUAL`, or what of it fits the model's context; what is asked for is held as it is asked for.
    Raises PluginError for a policy that does not bound a stream and for a compression that works inside encoder or decoder or wants to know
    the question, BudgetError for a share of what has no length and for more than the model's context, ModelError for a model whose
    positions cannot close up, or not under this policy.
    """

    def __init__(self, vlm: VLM, compression: Compression, kv: str | None, window: int = 8, worn: Worn = Worn()) -> None:
        check_model(vlm, compression)
        # all that is read is read with the adapters: what is held was computed by the model that is asked
        self._speaker, vlm = worn.decoder(vlm.decoder, [0]), worn.eye(vlm, 0)
        memory, self._hold = bounding(usual(vlm) if kv is None else kv)
        check_memory(vlm, memory)
        self._vlm, self._compression, self._window = vlm, compression, windowed(window)
        self._room = Room(vlm, compression, self._hold, self._window)
        # before the first frame something must stand in its place for the layout; the decoder never sees it
        blank = Image(torch.zeros(3, 16, 16, dtype=torch.uint8))
        with torch.no_grad():
            seen = Encoded.of(blank, vlm.encoder([blank])[0], vlm.name)
            head, _, _ = parted(vlm.layout(Prompt.of([seen], "?")))
            self._begun: tuple[int, ...] = ()
            if vlm.decoder.config.rope_sections.counts:
                # a clip may begin with words that a picture has not (Qwen3-VL's seconds): they wait for the first window
                pair = blank, Video(blank.pixels.expand(2, -1, -1, -1), torch.arange(2).float())
                self._begun = alike([flat(parted(vlm.layout(Prompt.of([one], "?")))[0]) for one in pair])
                head = (Ids(self._begun),)
            cache = memory.cache(vlm.decoder.config.layers, 1, device_of(vlm))
            self._run(cache, self._words(head))
            # from now on the budget holds
            cache.settle()
        self._now = State(cache, Arrived(), seen, words=ids(head))
        self._alone = Exclusive("stream")

    @property
    def cache(self) -> PolicyCache:
        """What is held: to be looked at, not to be changed."""
        return self._now.cache

    @property
    def held(self) -> int:
        """Tokens that are held, in the layer and by the head that hold most."""
        return _held(self._now.cache, self._vlm.decoder.config.layers)

    @property
    def kept(self) -> int:
        """Visual tokens that were read so far, whether they are still held or not."""
        return self._now.kept

    @property
    def frames(self) -> int:
        """How many frames have come."""
        return self._now.arrived.count

    @torch.no_grad()
    def push(self, frame: Source, seconds: float) -> None:
        """One more frame, in any form that intake reads, and when it was taken, by any clock.

        Raises InputError, naming the frame by its number, for one that is no picture, has another size than the first or is not later than
        the one before, and for a window of frames that the memory does not hold, at the first frame if its visual tokens alone are too
        many; it is then as if the frame had not come.
        """
        with self._alone:
            now = dataclasses.replace(self._now, arrived=self._now.arrived.push(frame, seconds))
            if now.arrived.count == 1:
                # what a model sees in a frame may depend on its size, which is that of all
                self._room.check(now.arrived.size)
            self._now = self._looked(now, Clock(device_of(self._vlm))) if len(now.arrived.frames) == self._window else now

    @torch.no_grad()
    def say(self, text: str) -> None:
        """Words that stand in the stream where they come: the frames that wait for their window are looked at before them.

        Raises InputError for text that is empty or does not fit into the memory.
        """
        words = written(text, "text", "what is to stand in the stream")
        if not words.strip():
            raise InputError("it is empty; write what is to stand in the stream", item="text")
        spans = (Ids(tuple(self._vlm.tokenizer.encode(f"{words}\n"))),)
        laid = self._words(spans)
        with self._alone:
            now = self._looked(self._now, Clock(device_of(self._vlm)))
            self._now = dataclasses.replace(now, cache=self._read(now.cache.fork(), laid), words=now.words | ids(spans), spoken=True)

    @door
    @torch.no_grad()
    def ask(
        self,
        question: str,
        *,
        keep: bool = False,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: Stop = (),
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        max_time: float = math.inf,
        logprobs: int = 0,
        schema: Schema | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> Answer:
        """Answer from what is remembered and the frames that wait; the stream stays as it was, unless the answer is to be kept in it.

        Settings are those of `GenerationConfig`; the answer is JSON of a `schema`, what a `regex` matches whole, or one of `choice`, where
        one of these is given. To a repetition penalty all words of the stream count, those that are no longer held among them. Of the
        answer's tokens, `recalled` are the entries that were held already. What other threads push meanwhile waits for an answer
        that is kept, and comes behind it; for others it does not wait.
        Raises InputError for settings that cannot be, for a stream in which nothing has come yet, and where question and answer do not
        fit the model beside what is held; ModelError where scores are not finite.
        """
        config = GenerationConfig(
            max_tokens, temperature, top_k, top_p, min_p, seed, stops(stop), repetition_penalty, presence_penalty, frequency_penalty,
            max_time, logprobs, Constraint.of(schema, regex, choice), num_beams, length_penalty, early_stopping,
        )  # fmt: skip
        checked(self._vlm, config)
        # what is kept goes on from a state that nobody else may go on from meanwhile
        with self._alone if keep else nullcontext():
            answer, after = self._asked(self._now, question, config, keep)
            if keep:
                self._now = after
        return answer

    def _asked(self, now: State, question: str, config: GenerationConfig, keep: bool) -> tuple[Answer, State]:
        """The answer of a stream that is so, and what the stream is behind it, which is whole only where it is to be kept."""
        if not (now.opened or now.spoken or now.arrived.frames):
            raise InputError("nothing has come yet; push a frame or say something before you ask", item="stream")
        clock, max_tokens = Clock(device_of(self._vlm)), config.max_tokens
        _, _, tail = parted(self._vlm.layout(Prompt.of([now.seen], question)))
        now = self._looked(dataclasses.replace(now, cache=now.cache.fork()), clock)
        now = dataclasses.replace(now, words=now.words | ids(tail))
        laid, held = self._words(tail), _held(now.cache, self._vlm.decoder.config.layers)
        now.cache.close_up()
        asked, ahead = held + len(laid.embeddings), int(now.cache.position[0]) + len(laid.embeddings)
        if asked + max_tokens > self._vlm.context:
            told = f"stream and question have {asked} tokens and the answer may have {max_tokens}, but the model holds {self._vlm.context}"
            raise InputError(f"{told}; hold less, or lower max_tokens", item="stream")
        decoder = self._vlm.decoder
        shape = Shape(decoder.config.layers, decoder.config.kv_heads, decoder.config.entry, decoder.dtype, device_of(self._vlm))
        check_copies(shape, DenseMemory(), 1, asked + max_tokens, max_tokens, config.num_beams, "num_beams")
        with clock.stage("prefill"):
            hidden = self._run(now.cache, laid)
        with clock.stage("decode"):
            said = self._said(now, hidden, config, clock.began)
        if isinstance(said.finish, MmsdkError):
            raise said.finish
        if keep:
            # what was said last may not have been read yet
            unread = said.ids[int(now.cache.position[0]) - ahead :]
            self._run(now.cache, self._words((Ids((*unread, *self._vlm.tokenizer.encode("\n"))),)))
            now = dataclasses.replace(now, words=now.words | frozenset(said.ids))
        counts, kind = Tokens(now.visual, now.kept, asked, len(said.ids), held), precision(self._vlm.decoder)
        rest = said.finish, (), kind, said.logprobs, said.ids, said.score
        return Answer(said.text.lstrip(), counts, clock.timings, int(config.seed), *rest), now

    def _looked(self, now: State, clock: Clock) -> State:
        """With the frames that wait read into the cache."""
        if not now.arrived.frames:
            return now
        arrived, vlm = now.arrived, self._vlm
        with clock.stage("encode"):
            tokens = moved(arrived.seen(vlm, joining=True), torch.device("cpu"))
        frames = len(arrived.frames)
        seen = Encoded(tokens, "stream", len(tokens), vlm.name, arrived.notes, size=arrived.size, frames=frames)
        laid = lay_out(vlm, self._compression, [(seen, "?")], 1, clock)
        for error in laid.errors.values():
            raise error
        (row,) = laid.rows.values()
        with clock.stage("prefill"):
            layout = vlm.layout(Prompt.of([seen, seen], "?"))
            ahead = (Ids(flat(parted(layout)[0])[len(self._begun) :]),) if self._begun else ()
            between = parted(layout)[1] if now.opened else ahead
            words = self._words(between)
            # Read into a fork: what is refused or interrupted leaves the stream as it was.
            cache = self._read(now.cache.fork(), joined(words, sight(row, arrived.count // self._window % 2)))
        heard = now.words | ids(between) | ids(within(layout))
        return State(cache, arrived.emptied(), seen, True, now.visual + row.visual, now.kept + row.kept, heard, now.spoken)

    def _read(self, cache: PolicyCache, laid: Laid) -> PolicyCache:
        """The cache with these tokens in it, and no more than is to be held."""
        new = len(laid.embeddings)
        if new > self._hold:
            raise self._room.refusal(new)
        if int(cache.position[0]) + new > min(2 * self._hold, self._vlm.context):
            cache.close_up()
        self._run(cache, laid)
        return cache

    def _run(self, cache: PolicyCache, laid: Laid) -> Float[Tensor, "1 d"]:
        """The decoder's output at the last of these tokens, which are in the cache then."""
        places = cache.position[0] + torch.arange(len(laid.embeddings), device=laid.embeddings.device)
        start = cache.position[0] + cache.shift[0]
        turns, following = tuple(axes + start for axes in laid.turns), tuple(place + start for place in laid.following)
        laid = dataclasses.replace(laid, positions=places, turns=turns, following=following)
        return prefill_into(self._speaker, [laid], (), cache, last=1).hidden[:, -1]

    def _words(self, spans: tuple[Part, ...]) -> Laid:
        """Words, and what a model has learned to stand between them, in front of the decoder."""
        # of no words, too, there are embeddings
        embeddings = Layout((Ids(()), *spans), media=0).embed([], self._vlm.decoder.embed, device_of(self._vlm))
        line = torch.arange(len(embeddings), device=embeddings.device)
        several = bool(self._vlm.decoder.config.rope_sections.counts)
        turns, following = ((line.expand(3, -1),), (line.new_tensor(len(line)),)) if several else ((), ())
        return Laid(embeddings, line, (Span(-1, (len(embeddings),)),), (), turns, following)

    def _said(self, now: State, hidden: Float[Tensor, "1 d"], config: GenerationConfig, began: float) -> Generated:
        vlm, guides = self._vlm, [guided(self._vlm, config)]
        words = [sorted(now.words)]
        given = self._speaker, hidden, now.cache, [config], vlm.tokenizer.decode, vlm.stop_ids, words, began, guides
        return search(*given)[0][0] if config.num_beams > 1 else collect(generate(*given), 1)[0]


def _held(cache: PolicyCache, layers: int) -> int:
    return max(int(cache.lengths(layer).max()) for layer in range(layers))
