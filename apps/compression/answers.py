"""Which questions are answered rightly behind compressed tokens; an input is read once for all of them where they change nothing in it.

An answer is right where each of its tokens, the end included, is the likeliest one: what greedy decoding would say exactly. So it is told
by one pass over the right answer, and no other is decoded.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from mmsdk.apps.compression.asked import Asked
from mmsdk.compress import Compression
from mmsdk.decoder.prefill import Laid, prefill_into, prefilled
from mmsdk.decoder.spans import Span
from mmsdk.encoded import Encoded
from mmsdk.models.types import VLM
from mmsdk.prompt import Ids, Prompt
from mmsdk.stages import Clock, Context, Question, Row, device_of, lay_out, prepare
from mmsdk.vision.types import Media

__all__ = ["right", "sources"]

# Tokens that no right answer is longer than.
_ROOM = 32


def right(vlm: VLM, compression: Compression, asked: Sequence[Asked], rows: int) -> list[bool]:
    """For each question of each input, in order, whether it is answered rightly; `rows` inputs go through the decoder together.

    Raises InputError where the method is not made for such inputs.
    """
    found = list[bool]()
    apart = bool(compression.inside_decoder) or compression.asks
    for some in (asked[at : at + rows] for at in range(0, len(asked), rows)):
        context = _apart(vlm, compression, some) if apart else _together(vlm, compression, some)
        found += _right(vlm, context, [qa.answer for one in some for qa in one.questions])
    return found


def sources(compression: Compression, asked: Sequence[Asked]) -> list[Media | Encoded]:
    """What a question is asked about: the input itself where the encoder is to see fewer tokens, else what was made of it before."""
    return [one.media if compression.inside_encoder else one.encoded for one in asked]


@torch.no_grad()
def _apart(vlm: VLM, compression: Compression, asked: Sequence[Asked]) -> Context:
    """Every question through the pipeline's own stages, with an input of its own."""
    given = zip(sources(compression, asked), asked, strict=True)
    items: list[Question] = [(source, qa.question) for source, one in given for qa in one.questions]
    ready = prepare(vlm, compression, items, _ROOM, Clock(device_of(vlm)))
    for error in ready.errors.values():
        raise error
    assert ready.context is not None, "no row failed"
    return ready.context


@torch.no_grad()
def _together(vlm: VLM, compression: Compression, asked: Sequence[Asked]) -> Context:
    """Every input through the stages up to the decoder and into it, then the words of each question behind a copy."""
    items: list[Question] = [(source, one.questions[0].question) for source, one in zip(sources(compression, asked), asked, strict=True)]
    laid = lay_out(vlm, compression, items, _ROOM, Clock(device_of(vlm)))
    for error in laid.errors.values():
        raise error
    words = [[_words(vlm, qa.question) for qa in one.questions] for one in asked]
    seen = [_seen(row, len(own[0])) for row, own in zip(laid.rows.values(), words, strict=True)]
    room = _ROOM + max(len(ids) for own in words for ids in own)
    _, cache = prefilled(vlm.decoder, seen, (), room, last=1)
    copies = cache.select(torch.tensor([place for place, own in enumerate(words) for _ in own]))
    behind = [_laid(vlm, ids, len(one.embeddings)) for one, own in zip(seen, words, strict=True) for ids in own]
    return Context(prefill_into(vlm.decoder, behind, (), copies, last=1).hidden[:, -1], copies)


def _words(vlm: VLM, question: str) -> tuple[int, ...]:
    """What stands behind the visual tokens."""
    last = vlm.layout(Prompt.of([], question)).spans[-1]
    assert isinstance(last, Ids), "a prompt ends in words"
    return last.ids


def _seen(row: Row, words: int) -> Laid:
    """A prompt without its last words."""
    count = len(row.embeddings) - words
    return Laid(row.embeddings[:count], row.positions[:count], (Span(-1, (count,)),), mass=tuple(mass[:count] for mass in row.mass))


def _laid(vlm: VLM, ids: Sequence[int], start: int) -> Laid:
    embedded = vlm.decoder.embed(torch.tensor([ids], device=device_of(vlm)))[0]
    return Laid(embedded, torch.arange(start, start + len(ids)), (Span(-1, (len(ids),)),))


@torch.no_grad()
def _right(vlm: VLM, context: Context, answers: Sequence[str]) -> list[bool]:
    """Whether each token of each answer is the likeliest behind those before it. Shorter answers are filled up behind their end."""
    (end,) = vlm.stop_ids
    ids = [[*vlm.tokenizer.encode(f" {answer}"), end] for answer in answers]
    width, device = max(map(len, ids)), device_of(vlm)
    told = torch.tensor([[*own, *[-1] * (width - len(own))] for own in ids], device=device)
    said = _likeliest(vlm, context, told)
    found: list[bool] = ((said == told) | (told < 0)).all(dim=1).tolist()
    return found


def _likeliest(vlm: VLM, context: Context, told: Int[Tensor, "b s"]) -> Int[Tensor, "b s"]:
    """The likeliest token in the place of each of an answer's, those before it given; of what fills up, any."""
    given = told[:, :-1]
    ahead = torch.arange(given.shape[1], device=told.device)
    positions = (context.cache.position[:, None] + ahead).masked_fill(given < 0, -1)
    hidden = context.hidden[:, None]
    if given.shape[1]:
        later = vlm.decoder(vlm.decoder.embed(given.clamp_min(0)), positions, context.cache)
        hidden = torch.cat([hidden, later], dim=1)
    likeliest: Tensor = vlm.decoder.logits(hidden).argmax(dim=-1)
    return likeliest
