"""The stages of a pipeline, one function each: read the media, encode and compress them, put the prompt together.

A batch goes through every stage together. A row that fails becomes its error and leaves the others alone.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.answer import Sight, Timings
from mmsdk.compress import Compression
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import BudgetError, InputError, MmsdkError
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.types import KVCache
from mmsdk.models.types import VLM
from mmsdk.prompt import Prompt
from mmsdk.tokencomp.types import Compressed
from mmsdk.vision.intake import Source, load
from mmsdk.vision.types import Media, VisualTokens

__all__ = [
    "Clock",
    "Context",
    "Prepared",
    "Question",
    "Row",
    "assemble",
    "compress",
    "device_of",
    "encode",
    "prefill",
    "prepare",
    "read",
]

Good = TypeVar("Good")


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
    """One question ready for the decoder: its tokens before (`visual`) and after (`kept`) compression, and the prompt."""

    visual: int
    kept: int
    sights: tuple[Sight, ...]
    embeddings: Float[Tensor, "s d"]
    positions: Int[Tensor, " s"]


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


def prepare(vlm: VLM, compression: Compression, items: Sequence[Question], room: int, clock: Clock) -> Prepared:
    """Take a batch through load, encode, compress and prefill, keeping `room` tokens free in the model's context for the answer."""
    with torch.no_grad():
        with clock.stage("load"):
            prompts, errors = _sorted(read(items))
        with clock.stage("encode"):
            full = encode(vlm, prompts)
        with clock.stage("compress"):
            thin, unfit = _sorted(compress(compression, full))
        with clock.stage("prefill"):
            rows, long = _sorted(assemble(vlm, prompts, full, thin, room))
            context = prefill(vlm.decoder, list(rows.values()), room) if rows else None
    return Prepared(rows, {**errors, **unfit, **long}, context)


def read(items: Sequence[Question]) -> dict[int, Prompt | InputError]:
    """Load the media of every question; a row whose media or words cannot be used becomes the error, with its place in the batch."""
    return {index: _read(index, media, words) for index, (media, words) in enumerate(items)}


def encode(vlm: VLM, prompts: Mapping[int, Prompt]) -> dict[int, list[VisualTokens]]:
    """Visual tokens of each row's media; all media of the batch go through the encoder together."""
    tokens = iter(vlm.encoder([item for prompt in prompts.values() for item in prompt.media]))
    return {index: [next(tokens) for _ in prompt.media] for index, prompt in prompts.items()}


def compress(compression: Compression, tokens: Mapping[int, Sequence[VisualTokens]]) -> dict[int, list[Compressed] | BudgetError]:
    """Thin each row's visual inputs; a budget that does not fit is that row's error."""
    return {index: _thin(compression, row) for index, row in tokens.items()}


def assemble(
    vlm: VLM, prompts: Mapping[int, Prompt], full: Mapping[int, Sequence[VisualTokens]], thin: Mapping[int, Sequence[Compressed]], room: int
) -> dict[int, Row | InputError]:
    """Connect what is left and put each prompt together, keeping `room` tokens free for the answer.

    A prompt that does not fit the model's context becomes an InputError that says what to do.
    """
    embedded = iter(vlm.connect([item.tokens for row in thin.values() for item in row]))
    rows: dict[int, Row | InputError] = {}
    for index, row in thin.items():
        sight = [next(embedded) for _ in row]
        layout = vlm.layout(prompts[index])
        counts = tuple(len(item) for item in sight)
        length = layout.length(counts)
        if length + room > vlm.context:
            rows[index] = _too_long(index, length, sum(counts), room, vlm.context)
            continue
        sights = tuple(_sight(*one) for one in zip(prompts[index].media, full[index], row, strict=True))
        embeddings = layout.embed(sight, vlm.decoder.embed, device_of(vlm))
        rows[index] = Row(sum(len(item) for item in full[index]), sum(counts), sights, embeddings, layout.positions(counts))
    return rows


def prefill(decoder: Decoder, rows: Sequence[Row], room: int) -> Context:
    """Run the prompts through the decoder in one pass, into a cache with space for `room` more tokens a row.

    Shorter prompts are padded in front, where positions of -1 keep the padding out of sight of everything.
    """
    config, first = decoder.config, rows[0].embeddings
    longest = max(len(row.embeddings) for row in rows)
    embeddings = first.new_zeros(len(rows), longest, config.width)
    positions = torch.full((len(rows), longest), -1, dtype=torch.int64, device=first.device)
    for place, row in enumerate(rows):
        embeddings[place, longest - len(row.embeddings) :] = row.embeddings
        positions[place, longest - len(row.embeddings) :] = row.positions
    sizes = config.layers, len(rows), config.kv_heads, config.head_dim, longest + room
    cache = DenseCache.allocate(*sizes, first.dtype, first.device)
    return Context(decoder(embeddings, positions, cache)[:, -1], cache)


def _sorted(results: Mapping[int, Good | MmsdkError]) -> tuple[dict[int, Good], dict[int, MmsdkError]]:
    """What went well and what did not."""
    good = {index: result for index, result in results.items() if not isinstance(result, MmsdkError)}
    return good, {index: result for index, result in results.items() if isinstance(result, MmsdkError)}


def _read(index: int, media: Source | Sequence[Source], words: str) -> Prompt | InputError:
    # a list or tuple is always several inputs here, never the frames of one clip
    sources = cast(Sequence[Source], media if isinstance(media, list | tuple) else [media])
    try:
        return Prompt.of([load(source) for source in sources], words)
    except InputError as error:
        return error.at(index)


def _thin(compression: Compression, row: Sequence[VisualTokens]) -> list[Compressed] | BudgetError:
    try:
        return compression(row)
    except BudgetError as error:
        return error


def _sight(media: Media, full: VisualTokens, thin: Compressed) -> Sight:
    return Sight(media.source, full.grid, full.positions, full.saliency, thin.audit)


def _too_long(index: int, length: int, visual: int, room: int, context: int) -> InputError:
    return InputError(
        f"the prompt has {length} tokens ({visual} of them visual) and the answer may take {room}, but the model holds {context}; "
        "compress more, ask about fewer pictures or frames, or lower max_tokens",
        item="prompt",
        index=index,
    )
