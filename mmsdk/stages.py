"""The stages of a pipeline: read the media, encode and compress them, put the prompts together, run them through the decoder.

A batch goes through every stage together. A row that fails becomes its error and leaves the others alone.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.answer import Sight, Timings
from mmsdk.compress import Compression, named
from mmsdk.decoder.prefill import Laid, prefilled
from mmsdk.decoder.spans import Span, places
from mmsdk.decoder.thinning import Cut, Thinned
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, MmsdkError
from mmsdk.kv.types import KVCache
from mmsdk.models.types import VLM
from mmsdk.prompt import Layout, Prompt, Slot
from mmsdk.seeing import Seen, compress, encode, parted
from mmsdk.tokencomp.audit import compose
from mmsdk.tokencomp.types import Audit
from mmsdk.vision.intake import Source, load

__all__ = [
    "Clock",
    "Context",
    "Prepared",
    "Question",
    "Row",
    "assemble",
    "cuts_of",
    "device_of",
    "prefill",
    "prepare",
    "read",
]

# What a user writes for one question: the media (one, several or none) and the words.
Question = tuple[Source | Sequence[Source], str]


class Clock:
    """Measures stages in milliseconds; a stage that runs twice adds up."""

    def __init__(self, device: torch.device) -> None:
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
class Row:
    """One question ready for the decoder: its tokens before (`visual`) and after (`kept`) compression, and the prompt.

    `spans` are the runs of words and of visual inputs in the prompt; without any it is all words.
    """

    visual: int
    kept: int
    sights: tuple[Sight, ...]
    embeddings: Float[Tensor, "s d"]
    positions: Int[Tensor, " s"]
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Context:
    """What the decoder knows after the prompts: its output at each row's last token, and the cache. Text and actions both start here."""

    hidden: Float[Tensor, "b d"]
    cache: KVCache


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch up to its first token: the rows that can be answered by their place, the errors of the others, and the context.

    The rows of the context are in the order of `rows`; without a row there is no context.
    """

    rows: dict[int, Row]
    errors: dict[int, MmsdkError]
    context: Context | None


def device_of(vlm: VLM) -> torch.device:
    """Where the decoder's weights are, and with them everything else."""
    return next(vlm.decoder.parameters()).device


def prepare(vlm: VLM, compression: Compression, items: Sequence[Question], room: int, clock: Clock, first: int = 0) -> Prepared:
    """Take a batch through load, encode, compress and prefill, keeping `room` tokens free in the model's context for the answer.

    Rows are counted from `first`, where they are part of a longer batch.
    """
    cuts = cuts_of(compression, vlm.decoder.config.layers)
    with torch.no_grad():
        with clock.stage("load"):
            prompts, errors = parted(read(items, first))
        with clock.stage("encode"):
            seen, unseen = parted(encode(vlm, prompts, compression))
        with clock.stage("compress"):
            entering, unfit = parted(compress(compression, seen))
        with clock.stage("prefill"):
            rows, long = parted(assemble(vlm, prompts, entering, room, len(cuts)))
            context, told = _prefilled(vlm.decoder, list(rows.values()), room, cuts) if rows else (None, [])
    return Prepared(dict(zip(rows, told, strict=True)), {**errors, **unseen, **unfit, **long}, context)


def cuts_of(compression: Compression, depth: int) -> tuple[Cut, ...]:
    """Where a decoder of `depth` layers drops visual tokens. Raises ModelError where it has too few layers for the method."""
    return tuple(Cut(layer, step.method) for step in compression.inside_decoder for layer in step.method.layers(depth))


def read(items: Sequence[Question], first: int = 0) -> dict[int, Prompt | InputError]:
    """Load the media of every question; a row whose media or words cannot be used becomes the error, with its place in the batch."""
    return {index: _read(index, media, words) for index, (media, words) in enumerate(items, first)}


def assemble(
    vlm: VLM, prompts: Mapping[int, Prompt], entering: Mapping[int, Sequence[Seen]], room: int, cuts: int = 0
) -> dict[int, Row | InputError]:
    """Connect what is left and put each prompt together, keeping `room` tokens free for the answer.

    A prompt that does not fit the model's context becomes an InputError that says what to do.
    """
    embedded = iter(vlm.connect([item.tokens for row in entering.values() for item in row]))
    rows: dict[int, Row | InputError] = {}
    for index, row in entering.items():
        sight = [next(embedded) for _ in row]
        layout = vlm.layout(prompts[index])
        counts = tuple(len(item) for item in sight)
        length = layout.length(counts)
        if length + room > vlm.context:
            rows[index] = _too_long(index, length, sum(counts), room, vlm.context)
            continue
        spans = _spans(layout, row, counts, cuts)
        kept = sum(span.counts[-1] for span in spans if span.media >= 0)
        embeddings = layout.embed(sight, vlm.decoder.embed, device_of(vlm))
        sights = tuple(item.sight for item in row)
        rows[index] = Row(sum(item.full for item in row), kept, sights, embeddings, layout.positions(counts), spans)
    return rows


def prefill(decoder: Decoder, rows: Sequence[Row], room: int) -> Context:
    """Run the prompts through the decoder in one pass, into a cache with space for `room` more tokens a row."""
    return _prefilled(decoder, rows, room, ())[0]


def _prefilled(decoder: Decoder, rows: Sequence[Row], room: int, cuts: Sequence[Cut]) -> tuple[Context, list[Row]]:
    """The same, dropping tokens at the cuts; the rows then tell which."""
    whole = 1 + len(cuts)
    laid = [Laid(row.embeddings, row.positions, row.spans or (Span(-1, (len(row.embeddings),) * whole),)) for row in rows]
    run, cache = prefilled(decoder, laid, cuts, room)
    told = [_told(row, place, run, named(cuts[0].by)) for place, row in enumerate(rows)] if cuts else list(rows)
    return Context(run.hidden[:, -1], cache), told


def _told(row: Row, place: int, run: Thinned, method: str) -> Row:
    """The row with the tokens that the decoder dropped in its audits."""
    entered, left = places(row.spans, 0, run.scores.shape[1]), places(row.spans, -1, run.origin.shape[1])
    sights = []
    for media, sight in enumerate(row.sights):
        kept = run.origin[place, left[media]] - entered[media].start
        assignment = kept.new_full((entered[media].stop - entered[media].start,), -1)
        assignment[kept] = torch.arange(len(kept), device=kept.device)
        audit = compose(sight.audit, Audit(method, assignment, run.scores[place, entered[media]], run.seconds))
        # a method that chose in front of the decoder and inside it is one method
        name = sight.audit.method if sight.audit.method.split("+")[-1] == method else audit.method
        sights.append(dataclasses.replace(sight, audit=dataclasses.replace(audit, method=name)))
    return dataclasses.replace(row, sights=tuple(sights))


def _read(index: int, media: Source | Sequence[Source], words: str) -> Prompt | InputError:
    # a list or tuple is always several inputs here, never the frames of one clip
    sources = cast(Sequence[Source], media if isinstance(media, list | tuple) else [media])
    try:
        return Prompt.of([load(source) for source in sources], words)
    except InputError as error:
        return error.at(index)


def _spans(layout: Layout, row: Sequence[Seen], counts: Sequence[int], cuts: int) -> tuple[Span, ...]:
    """The runs of the prompt, in order, with their tokens at first and after each cut."""
    return tuple(
        Span(span.media, (counts[span.media], *row[span.media].counts))
        if isinstance(span, Slot)
        else Span(-1, (len(span.ids),) * (1 + cuts))
        for span in layout.spans
    )


def _too_long(index: int, length: int, visual: int, room: int, context: int) -> InputError:
    return InputError(
        f"the prompt has {length} tokens ({visual} of them visual) and the answer may take {room}, but the model holds {context}; "
        "compress more, ask about fewer pictures or frames, or lower max_tokens",
        item="prompt",
        index=index,
    )
