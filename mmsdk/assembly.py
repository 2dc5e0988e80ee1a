"""Prompts put together for the decoder: words and what is left of the visual inputs in one row of embeddings, each with its position."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.answer import Sight
from mmsdk.decoder.spans import Span
from mmsdk.device import device_of
from mmsdk.errors import InputError
from mmsdk.models.types import VLM
from mmsdk.prompt import Ids, Layout, Prompt, Slot
from mmsdk.seeing import Entered
from mmsdk.vision.types import VisualTokens
from mmsdk.vision.values import brief

__all__ = ["Row", "assemble"]


@dataclass(frozen=True, slots=True)
class Row:
    """One question ready for the decoder: its tokens before (`visual`) and after (`kept`) compression, and the prompt.

    `spans` are the runs of words and of visual inputs in the prompt; without any it is all words. `deep` is what the first layers add to
    the visual tokens, zero at words. `recalled` tokens at its beginning were in the cache already. `turns` and `following` are as in
    `mmsdk.decoder.prefill.Laid`. `words` are the ids of all its words. `mass` is there where attention is
    proportional.
    """

    visual: int
    kept: int
    sights: tuple[Sight, ...]
    embeddings: Float[Tensor, "s d"]
    positions: Int[Tensor, " s"]
    spans: tuple[Span, ...] = ()
    deep: tuple[Float[Tensor, "s d"], ...] = ()
    recalled: int = 0
    turns: tuple[Int[Tensor, "3 s"], ...] = ()
    following: tuple[Int[Tensor, ""], ...] = ()
    words: tuple[int, ...] = ()
    mass: tuple[Float[Tensor, " s"], ...] = ()

    def __repr__(self) -> str:
        return brief(self)


def assemble(
    vlm: VLM,
    prompts: Mapping[int, Prompt],
    entered: Mapping[int, Sequence[Entered]],
    room: int,
    cuts: int = 0,
    proportional: bool = False,
) -> dict[int, Row | InputError]:
    """Put each prompt together, keeping `room` positions free for the answer.

    A prompt that does not fit the model's context becomes an InputError that says what to do.
    """
    rows: dict[int, Row | InputError] = {}
    for index, row in entered.items():
        given = vlm.layout(prompts[index])
        layout = given.resolved([item.entering.cells for item in row])
        counted, tokens = [item.entering.counted for item in row], [item.seen.tokens for item in row]
        length = layout.length(counted)
        if length + room > vlm.context:
            rows[index] = _too_long(index, length, sum(counted), room, vlm.context)
            continue
        entering = given.resolved([item.entering.cells[item.entering.places] for item in row])
        spans = _spans(entering, row, cuts)
        kept = sum(span.counts[-1] for span in spans if span.media >= 0)
        embeddings = entering.embed([one.features for one in tokens], vlm.decoder.embed, device_of(vlm))
        positions = layout.positions(counted, [item.entering.places for item in row])
        sights = tuple(item.seen.sight for item in row)
        deep = _deep(entering, tokens, embeddings)
        turns = layout.turns([item.entering.cells for item in row], tokens, [item.entering.places for item in row], embeddings.device)
        if turns:
            # places are told by the turns, and positions only count
            positions = torch.arange(len(embeddings))
        axes, following = tuple(one.axes for one in turns), tuple(one.following for one in turns)
        words = tuple(chain.from_iterable(span.ids for span in given.spans if isinstance(span, Ids)))
        full = sum(item.seen.full for item in row)
        mass = (_mass(entering, row, embeddings.device),) if proportional else ()
        rows[index] = Row(full, kept, sights, embeddings, positions, spans, deep, 0, axes, following, words, mass)
    return rows


def _spans(layout: Layout, row: Sequence[Entered], cuts: int) -> tuple[Span, ...]:
    """The runs of the prompt, in order, with their tokens at first and after each cut; see `mmsdk.decoder.spans` for those of one input."""
    left = {media: item.entering.counts for media, item in enumerate(row)}
    lengths = layout.lengths([len(item.seen.tokens) for item in row])
    return tuple(
        Span(span.media, (length, *left.pop(span.media, (0,) * cuts))) if isinstance(span, Slot) else Span(-1, (length,) * (1 + cuts))
        for span, length in zip(layout.spans, lengths, strict=True)
    )


def _mass(layout: Layout, row: Sequence[Entered], device: torch.device) -> Float[Tensor, " s"]:
    """The logarithm of how many tokens each stands for: of words one, of each visual input as many as it had by those that are left."""
    tokens = [len(item.seen.tokens) for item in row]
    each = [math.log(item.seen.full / count) for item, count in zip(row, tokens, strict=True)]
    runs = torch.tensor([each[span.media] if isinstance(span, Slot) else 0.0 for span in layout.spans])
    return runs.repeat_interleave(torch.tensor(layout.lengths(tokens))).to(device)


def _deep(layout: Layout, tokens: Sequence[VisualTokens], embeddings: Float[Tensor, "s d"]) -> tuple[Float[Tensor, "s d"], ...]:
    """The deep features of all visual inputs where their tokens stand, by layer; an encoder has them for all inputs or for none."""
    order = [span for span in layout.spans if isinstance(span, Slot)]
    stands = layout.visual([len(one) for one in tokens]).to(embeddings.device)
    added = tuple(torch.zeros_like(embeddings) for _ in (tokens[0].deep if tokens else ()))
    for layer, stream in enumerate(added):
        stream[stands] = torch.cat([tokens[span.media].deep[layer][span.start : span.stop] for span in order]).to(stream.dtype)
    return added


def _too_long(index: int, length: int, visual: int, room: int, context: int) -> InputError:
    return InputError(
        f"the prompt takes {length} positions ({visual} of them visual) and the answer may take {room}, but the model holds {context}; "
        "compress more in front of the decoder, ask about fewer pictures or frames, or lower max_tokens",
        item="prompt",
        index=index,
    )
