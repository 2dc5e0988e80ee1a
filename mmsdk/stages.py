"""The stages of a pipeline: read the media, encode and compress them, put the prompts together, run them through the decoder.

A batch goes through every stage together. A row that fails becomes its error and leaves the others alone.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.adapters import Worn
from mmsdk.answer import Timings
from mmsdk.assembly import Row, assemble
from mmsdk.compress import PROPORTIONAL, Compression, named
from mmsdk.decoder.prefill import Laid, capacities, prefill_into, rest_of
from mmsdk.decoder.spans import Span, places
from mmsdk.decoder.thinning import Cut, Thinned
from mmsdk.decoder.transformer import Decoder
from mmsdk.device import device_of
from mmsdk.errors import InputError, MmsdkError
from mmsdk.fitting import Fit, before, behind, by_plan, inside_encoder
from mmsdk.kv.memory import DenseMemory, Memory, Shape
from mmsdk.kv.room import check_copies
from mmsdk.kv.types import KVCache
from mmsdk.legibility import guarded
from mmsdk.models.types import VLM
from mmsdk.prompt import Prompt
from mmsdk.reading import Question, read, refuse_messages
from mmsdk.recall import Recall, keys_of
from mmsdk.seeing import Seen, asked, compress, connect, encode, enter, parted
from mmsdk.tokencomp.audit import compose
from mmsdk.tokencomp.types import Audit
from mmsdk.vision.values import brief

__all__ = [
    "Clock",
    "Context",
    "LaidOut",
    "Prepared",
    "Question",
    "Row",
    "assemble",
    "cuts_of",
    "device_of",
    "lay_out",
    "legible",
    "prefill",
    "prepare",
    "read",
    "refuse_messages",
]

_FORGETFUL, _PLAIN = Recall(), Worn()
Before = TypeVar("Before")
Done = TypeVar("Done")


class Clock:
    """Measures stages in milliseconds; a stage that runs twice adds up. `began` is when it was made, by `time.perf_counter`."""

    def __init__(self, device: torch.device) -> None:
        self.began = time.perf_counter()
        self._device = device
        self._ms: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what runs inside. Work queued on a GPU is waited for, so that it counts where it was asked for."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._ms[name] = self._ms.get(name, 0.0) + 1000 * (time.perf_counter() - started)

    @property
    def timings(self) -> Timings:
        """The stages so far."""
        return Timings(**self._ms)


@dataclass(frozen=True, slots=True)
class Context:
    """What the decoder knows after the prompts: its output at each row's last token, and the cache. Text and actions both start here."""

    hidden: Float[Tensor, "b d"]
    cache: KVCache

    def __repr__(self) -> str:
        return brief(self)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch up to its first token: the rows that can be answered by their place, the errors of the others, and the context.

    The rows of the context are in the order of `rows`; without a row there is no context.
    """

    rows: dict[int, Row]
    errors: dict[int, MmsdkError]
    context: Context | None


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A batch in front of the decoder. `keys` are of the blocks of each row, in the order of `rows`, where they can be found again."""

    rows: dict[int, Row]
    errors: dict[int, MmsdkError]
    keys: list[list[bytes]]
    prompts: dict[int, Prompt]
    seen: dict[int, list[Seen]]


def prepare(
    vlm: VLM,
    compression: Compression,
    items: Sequence[Question],
    room: int,
    clock: Clock,
    first: int = 0,
    recall: Recall = _FORGETFUL,
    copies: int = 1,
    worn: Worn = _PLAIN,
) -> Prepared:
    """Take a batch through load, encode, compress and prefill, keeping `room` tokens free in the model's context for the answer.

    What `recall` knows of earlier calls is not computed again. Rows are counted from `first`, where they are part of a longer batch; the
    cache has room for `copies` answers of each of them, and `worn` are their adapters.
    Raises InputError where `room` leaves none for any prompt, and where so many copies cannot be held.
    """
    cuts = cuts_of(compression, vlm.decoder.config.layers)
    if vlm.decoder.config.levels and (cuts or compression.proportional):
        raise InputError("this model's levels take every token, and as it is; leave it out", item="compress")
    if compression.proportional and not isinstance(recall.memory, DenseMemory):
        raise InputError(
            f"{PROPORTIONAL} is for memories that keep every token as it is in one piece: leave it, or kv, out", item="compress"
        )
    with torch.no_grad():
        laid = lay_out(vlm, compression, items, room, clock, first, recall, worn)
        with clock.stage("prefill"):
            rows, decoder = list(laid.rows.values()), worn.decoder(vlm.decoder, list(laid.rows))
            context, told = _prefilled(decoder, rows, room, cuts, recall.memory, laid.keys, copies) if rows else (None, [])
        with clock.stage("compress"):
            looked = legible(laid, told)
            ready, starved = parted(looked)
            if context is not None and starved:
                context = _among(context, [place for place, index in enumerate(looked) if index in ready])
    return Prepared(ready, {**laid.errors, **starved}, context)


def lay_out(
    vlm: VLM,
    compression: Compression,
    items: Sequence[Question],
    room: int,
    clock: Clock,
    first: int = 0,
    recall: Recall = _FORGETFUL,
    worn: Worn = _PLAIN,
) -> LaidOut:
    """The same up to the decoder; see `prepare`."""
    if room >= vlm.context:
        raise InputError(f"{room} leaves no room for a prompt: the model holds {vlm.context} tokens; ask for fewer", item="max_tokens")
    cuts, fit = cuts_of(compression, vlm.decoder.config.layers), Fit.of(vlm, compression, recall.memory)
    with torch.no_grad():
        with clock.stage("load"):
            prompts, errors = parted(read(items, first))
            eyes = {index: worn.eye(vlm, index) for index in prompts}
            prompts, contents = recall.looked_up(prompts, compression, {index: eye.name for index, eye in eyes.items() if eye is not vlm})
        with clock.stage("compress"):
            plans, missed = parted(fit(prompts))
        with clock.stage("encode"):
            fitted, looked = {index: prompts[index] for index in plans}, dict[int, list[Seen] | MmsdkError]()
            names = {index: eye.name for index, eye in eyes.items()}
            for wave in recall.waves(fitted, compression, contents):
                prompts |= wave
                looked |= _by_eye(eyes, wave, lambda eye, mine: _encoded(eye, plans, mine))
                tokens = {index: [one.tokens for one in row] for index in wave if not isinstance(row := looked[index], MmsdkError)}
                recall.saw(names, compression, wave, {index: contents[index] for index in wave if contents}, tokens)
            seen, unseen = parted({index: looked[index] for index in fitted})
        with clock.stage("compress"):
            shorter, unfit = parted(by_plan(plans, seen, before, compress))
        with clock.stage("prefill"):
            embedded = _by_eye(eyes, shorter, connect)
        with clock.stage("compress"):
            questions = asked(vlm, {index: prompts[index] for index in embedded}) if compression.asks else {}
            entered, unmet = parted(by_plan(plans, embedded, behind, lambda plan, rows: enter(plan, rows, questions)))
        with clock.stage("prefill"):
            rows, long = parted(assemble(vlm, prompts, entered, room, len(cuts), compression.proportional))
            entering = {index: [item.seen.tokens for item in entered[index]] for index in rows}
            keys = keys_of(vlm, recall, plans, prompts, contents, entering, worn.key)
    return LaidOut(rows, {**errors, **missed, **unseen, **unfit, **unmet, **long}, keys, prompts, seen)


def _encoded(eye: VLM, plans: Mapping[int, Compression], prompts: Mapping[int, Prompt]) -> dict[int, list[Seen] | MmsdkError]:
    return by_plan(plans, prompts, inside_encoder, lambda plan, rows: encode(eye, rows, plan))


def _by_eye(
    eyes: Mapping[int, VLM], rows: Mapping[int, Before], work: Callable[[VLM, dict[int, Before]], Mapping[int, Done]]
) -> dict[int, Done]:
    """Work on all rows that are looked at with the same encoder and projector together; what comes of it, in the order of rows."""
    done: dict[int, Done] = {}
    for eye in {id(eyes[index]): eyes[index] for index in rows}.values():
        done |= work(eye, {index: row for index, row in rows.items() if eyes[index] is eye})
    return {index: done[index] for index in rows}


def legible(laid: LaidOut, rows: Sequence[Row]) -> dict[int, Row | InputError]:
    """The rows, as the decoder left them, with a note on writing that too few tokens are left of; see `mmsdk.legibility`."""
    return {index: _guarded(index, row, laid.prompts[index], laid.seen[index]) for index, row in zip(laid.rows, rows, strict=True)}


def cuts_of(compression: Compression, depth: int) -> tuple[Cut, ...]:
    """Where a decoder of `depth` layers drops visual tokens. Raises ModelError where it has too few layers for the method."""
    return tuple(Cut(layer, step.method) for step in compression.inside_decoder for layer in step.method.layers(depth))


def prefill(decoder: Decoder, rows: Sequence[Row], room: int) -> Context:
    """Run the prompts through the decoder in one pass, into a cache with space for `room` more tokens a row."""
    return _prefilled(decoder, rows, room, (), DenseMemory(), [[]] * len(rows))[0]


def _prefilled(
    decoder: Decoder, rows: Sequence[Row], room: int, cuts: Sequence[Cut], memory: Memory, keys: Sequence[Sequence[bytes]], copies: int = 1
) -> tuple[Context, list[Row]]:
    """The same, dropping tokens at the cuts; the rows then tell which. What the memory knows by the keys of rows is not run again."""
    whole = 1 + len(cuts)
    spans = [row.spans or (Span(-1, (len(row.embeddings),) * whole),) for row in rows]
    laid = [
        Laid(row.embeddings, row.positions, own, row.deep, row.turns, row.following, row.mass) for row, own in zip(rows, spans, strict=True)
    ]
    config, first = decoder.config, rows[0].embeddings
    shape = Shape(config.layers, config.kv_heads, config.entry, first.dtype, first.device, config.levels)
    sizes = capacities(decoder, laid, cuts, room)
    check_copies(shape, memory, len(rows), max(sizes), room, copies, "num_beams, n")
    cache, known = memory.begin(shape, sizes, _searched(laid, keys, memory.page), copies, room)
    run = prefill_into(decoder, [rest_of(*one) for one in zip(laid, known, strict=True)], cuts, cache, memory.chunk, last=1)
    memory.learn(cache, keys)
    share = run.seconds / max(1, sum(len(row.sights) for row in rows))
    told = [_told(row, place, run, named(cuts[0].by), share) for place, row in enumerate(rows)] if cuts else list(rows)
    return Context(run.hidden[:, -1], cache), [dataclasses.replace(row, recalled=count) for row, count in zip(told, known, strict=True)]


def _searched(rows: Sequence[Laid], keys: Sequence[Sequence[bytes]], page: int) -> list[Sequence[bytes]]:
    """The keys without that of a block at the very end of a prompt: someone waits for the output of its last token."""
    return [chain[: (len(row.embeddings) - 1) // page] if page else () for row, chain in zip(rows, keys, strict=True)]


def _told(row: Row, place: int, run: Thinned, method: str, seconds: float) -> Row:
    """The row with the tokens that the decoder dropped in its audits, each of which is given its share of the seconds."""
    entered, origin = places(row.spans, run.scores.shape[1]), run.origin[place]
    sights = []
    for media, sight in enumerate(row.sights):
        columns = entered[media].to(origin.device)
        number = origin.new_full((run.scores.shape[1],), -1).index_copy(0, columns, torch.arange(len(columns), device=origin.device))
        # the number of each token that is left, or -1: those of this input, ascending, are the last ones when sorted
        left = number[origin.clamp_min(0)].masked_fill(origin < 0, -1).sort().values
        kept = left[len(left) - sum(span.counts[-1] for span in row.spans if span.media == media) :]
        assignment = kept.new_full((len(columns),), -1)
        assignment[kept] = torch.arange(len(kept), device=kept.device)
        audit = compose(sight.audit, Audit(method, assignment, run.scores[place, columns], seconds))
        # a method that chose in front of the decoder and inside it is one method
        name = sight.audit.method if sight.audit.method.split("+")[-1] == method else audit.method
        sights.append(dataclasses.replace(sight, audit=dataclasses.replace(audit, method=name)))
    return dataclasses.replace(row, sights=tuple(sights))


def _guarded(index: int, row: Row, prompt: Prompt, seen: Sequence[Seen]) -> Row | InputError:
    try:
        return dataclasses.replace(row, sights=guarded(prompt.media, seen, row.sights))
    except InputError as error:
        return error.at(index)


def _among(context: Context, places: Sequence[int]) -> Context | None:
    """The context of these rows alone; none where there are none."""
    if not places:
        return None
    rows = torch.tensor(places, device=context.hidden.device)
    return Context(context.hidden[rows], context.cache.select(rows))
