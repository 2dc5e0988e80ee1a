"""What a model sees of each question: media through the encoder, through the projector, and what compression leaves of them on the way.

    encode      pixels to the encoder's tokens
    compress    the steps that need no projector
    connect     to embeddings of the language model
    enter       the steps behind the projector, which may be told the question, and what goes into the decoder

A batch goes through together. A row that fails becomes its error and leaves the others alone.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.answer import Sight
from mmsdk.compress import Compression, Entering, Step, named
from mmsdk.device import device_of
from mmsdk.encoded import Encoded, moved
from mmsdk.errors import InputError, MmsdkError, ModelError
from mmsdk.models.types import VLM
from mmsdk.prompt import Prompt
from mmsdk.tokencomp.audit import compose
from mmsdk.tokencomp.plan import untouched
from mmsdk.tokencomp.types import Audit, Compressed
from mmsdk.vision.prune import Pruner, Pruning
from mmsdk.vision.shorten import PruningEncoder, Shortened, Shortener, Shortening, ShorteningEncoder
from mmsdk.vision.types import Media, Video, VisionEncoder, VisualTokens
from mmsdk.vision.values import brief

__all__ = ["Entered", "Seen", "asked", "compress", "connect", "encode", "enter", "parted"]

Good = TypeVar("Good")
Plan = TypeVar("Plan", bound=Shortening | Pruning)


@dataclass(frozen=True, slots=True)
class Seen:
    """One visual input on its way to the decoder: how many tokens it has in full, what is left of them, and their story so far."""

    full: int
    tokens: VisualTokens
    sight: Sight

    def __repr__(self) -> str:
        return brief(self)


@dataclass(frozen=True, slots=True)
class Entered:
    """One visual input in front of the decoder, its features being embeddings; see `mmsdk.compress.Entering` for counts and places."""

    seen: Seen
    entering: Entering

    def __repr__(self) -> str:
        return brief(self)


def encode(vlm: VLM, prompts: Mapping[int, Prompt], compression: Compression = Compression()) -> dict[int, list[Seen] | MmsdkError]:
    """Visual tokens of each row's media; all media of the batch go through the encoder together, but for what was encoded before.

    A budget that the step inside the encoder cannot meet is that row's error, and so is an input that the encoder cannot see. Raises
    ModelError where the encoder takes no such step.
    """
    if compression.inside_encoder:
        return _encode_shortened(vlm, prompts, compression.inside_encoder[0])
    fresh = {index: [item for item in prompt.media if not isinstance(item, Encoded)] for index, prompt in prompts.items()}
    seen, unseen = parted(_encoded(vlm, fresh))
    rows = {index: [item if isinstance(item, Encoded) else seen[index].pop(0) for item in prompts[index].media] for index in seen}
    return {**{index: _recalled(vlm, index, row) for index, row in rows.items()}, **unseen}


def compress(compression: Compression, seen: Mapping[int, Sequence[Seen]]) -> dict[int, list[Seen] | MmsdkError]:
    """Thin each row's visual inputs by the steps that need no projector; a budget that does not fit is that row's error.

    Inputs of all rows are planned for together; row by row only where one of them does not fit.
    """

    def thinned(items: Sequence[Seen], _: Sequence[int]) -> list[Seen]:
        return [_left(*one) for one in zip(items, compression([item.tokens for item in items]), strict=True)]

    return _together(seen, thinned)


def connect(vlm: VLM, seen: Mapping[int, Sequence[Seen]]) -> dict[int, list[Seen]]:
    """Project what is left of all inputs in one pass: features become embeddings of the language model."""
    embedded = iter(vlm.connect([item.tokens for row in seen.values() for item in row]))
    return {index: [_embedded(item, next(embedded)) for item in row] for index, row in seen.items()}


def asked(vlm: VLM, prompts: Mapping[int, Prompt]) -> dict[int, Float[Tensor, "_ d"]]:
    """The embeddings of each row's words, as the user wrote them, in the language model's space."""
    ids = {index: vlm.tokenizer.encode(prompt.text) for index, prompt in prompts.items()}
    device = device_of(vlm)
    together = torch.tensor([[i for row in ids.values() for i in row]], dtype=torch.int64, device=device)
    return dict(zip(ids, vlm.decoder.embed(together)[0].split([len(row) for row in ids.values()]), strict=True))


def enter(
    compression: Compression, seen: Mapping[int, Sequence[Seen]], questions: Mapping[int, Float[Tensor, "_ d"]]
) -> dict[int, list[Entered] | MmsdkError]:
    """Thin each row's embedded inputs to what goes into the decoder, together as `compress` does.

    `questions` are looked at where a step asks, and may be none otherwise.
    """

    def entered(items: Sequence[Seen], rows: Sequence[int]) -> list[Entered]:
        query = [questions[row] for row in rows] if compression.asks else None
        entering = compression.entering([item.tokens for item in items], query)
        return [Entered(_left(item, one.compressed), one) for item, one in zip(items, entering, strict=True)]

    return _together(seen, entered)


def parted(results: Mapping[int, Good | MmsdkError]) -> tuple[dict[int, Good], dict[int, MmsdkError]]:
    """What went well and what did not."""
    good = {index: result for index, result in results.items() if not isinstance(result, MmsdkError)}
    return good, {index: result for index, result in results.items() if isinstance(result, MmsdkError)}


def _encoded(vlm: VLM, media: Mapping[int, Sequence[Media]]) -> dict[int, list[Seen] | MmsdkError]:
    """What the encoder makes of each row's media, in one pass; row by row where that fails, to tell which it is."""
    try:
        tokens = iter(vlm.encoder([item for row in media.values() for item in row]))
    except InputError:
        return {index: _encoded_alone(vlm, index, row) for index, row in media.items()}
    return {index: [_seen(item, next(tokens)) for item in row] for index, row in media.items()}


def _encoded_alone(vlm: VLM, index: int, row: Sequence[Media]) -> list[Seen] | MmsdkError:
    seen = list[Seen]()
    for place, item in enumerate(row):
        try:
            seen.append(_seen(item, *vlm.encoder([item])))
        except InputError as error:
            # an encoder knows pixels, and no names
            return _of(InputError(error.message), [one.source for one in row], place).at(index)
    return seen


def _encode_shortened(vlm: VLM, prompts: Mapping[int, Prompt], step: Step[Shortener | Pruner]) -> dict[int, list[Seen] | MmsdkError]:
    method, name = step.method, named(step.method)
    if isinstance(method, Pruner):
        return _encode_inside(vlm, prompts, _pruning(vlm, method, step.amount != "adaptive"), step)
    if not isinstance(vlm.encoder, ShorteningEncoder):
        raise ModelError(f"{name} works inside the encoder, and that of {vlm.name!r} cannot be shortened; leave it out")
    encoder = vlm.encoder
    inside = _Inside(lambda size, frames, count: encoder.plan(size, frames, method, count), encoder.shortened)
    return _encode_inside(vlm, prompts, inside, step)


@dataclass(frozen=True, slots=True)
class _Inside(Generic[Plan]):
    """How each view of (size, frames) comes to a count, and the tokens of media by such plans; an amount that is everything is left alone
    where `exact`."""

    plan: Callable[[tuple[int, int], int, int], list[Plan]]
    run: Callable[[Sequence[Media], Sequence[Sequence[Plan]]], list[Shortened]]
    exact: bool = True


def _pruning(vlm: VLM, method: Pruner, exact: bool) -> _Inside[Pruning]:
    encoder = vlm.encoder
    if not isinstance(encoder, PruningEncoder):
        raise ModelError(f"{named(method)} removes tokens inside the encoder, and that of {vlm.name!r} takes none out; leave it out")
    return _Inside(lambda size, frames, count: encoder.prunings(size, frames, method, count, exact), encoder.pruned, exact)


def _encode_inside(
    vlm: VLM, prompts: Mapping[int, Prompt], inside: _Inside[Plan], step: Step[Shortener | Pruner]
) -> dict[int, list[Seen] | MmsdkError]:
    plans, unfit = parted({index: _plans(vlm.encoder, index, prompt.media, inside, step) for index, prompt in prompts.items()})
    return {**_inside(vlm, plans, inside, step), **unfit}


def _inside(
    vlm: VLM, rows: Mapping[int, list[tuple[Media, list[Plan]]]], inside: _Inside[Plan], step: Step[Shortener | Pruner]
) -> dict[int, list[Seen] | MmsdkError]:
    """What the encoder makes of each row's media by these plans, in one pass; one by one where that fails, to tell which it is."""
    todo = [one for row in rows.values() for one in row]
    try:
        whole = iter(vlm.encoder([item for item, plan in todo if not plan]))
        short = iter(inside.run([item for item, plan in todo if plan], [plan for _, plan in todo if plan]))
    except InputError:
        return {index: _inside_alone(vlm, index, row, inside, step) for index, row in rows.items()}
    results = (_shortened(item, next(short), vlm.encoder, named(step.method)) if plan else _seen(item, next(whole)) for item, plan in todo)
    return {index: [next(results) for _ in row] for index, row in rows.items()}


def _inside_alone(
    vlm: VLM,
    index: int,
    row: Sequence[tuple[Media, list[Plan]]],
    inside: _Inside[Plan],
    step: Step[Shortener | Pruner],
) -> list[Seen] | MmsdkError:
    seen = list[Seen]()
    for place, (item, plan) in enumerate(row):
        try:
            if plan:
                (short,) = inside.run([item], [plan])
                seen.append(_shortened(item, short, vlm.encoder, named(step.method)))
            else:
                seen.append(_seen(item, *vlm.encoder([item])))
        except InputError as error:
            return _of(InputError(error.message), [media.source for media, _ in row], place).at(index)
    return seen


def _shortened(item: Media, result: Shortened, encoder: VisionEncoder, method: str) -> Seen:
    tokens, owner = result.tokens, result.owner
    # what was removed on the way has no saliency: the encoder's is that of its last layers
    saliency = tokens.saliency[owner.clamp_min(0)].masked_fill(owner < 0, 0.0)
    sight = Sight(item.source, tokens.grid, result.positions, saliency, Audit(method, owner, result.scores), item.notes)
    return Seen(encoder.count(item.size, _frames(item)), tokens, sight)


def _plans(
    encoder: VisionEncoder, index: int, media: Sequence[Media | Encoded], inside: _Inside[Plan], step: Step[Shortener | Pruner]
) -> list[tuple[Media, list[Plan]]] | InputError:
    """How the encoder is shortened for each frame of each input of a row; not at all where the budget is exactly all that there is."""
    plans = list[tuple[Media, list[Plan]]]()
    for place, item in enumerate(media):
        try:
            fresh = _fresh(item, step)
            plans.append((fresh, _plan(encoder, fresh, inside, step)))
        except InputError as error:
            return _of(error, [one.source for one in media], place).at(index)
    return plans


def _fresh(item: Media | Encoded, step: Step[Shortener | Pruner]) -> Media:
    if isinstance(item, Encoded):
        told = f"{named(step.method)} works inside the encoder, and this was encoded before; ask with the picture itself"
        raise InputError(told, item=item.source)
    return item


def _recalled(vlm: VLM, index: int, row: Sequence[Seen | Encoded]) -> list[Seen] | InputError:
    """A row with what was encoded before brought back; the row's error where another model encoded it."""
    try:
        return [_brought_back(vlm, item) if isinstance(item, Encoded) else item for item in row]
    except InputError as error:
        return error.at(index)


def _brought_back(vlm: VLM, item: Encoded) -> Seen:
    width = item.tokens.features.shape[1]
    if item.model != vlm.name or width != vlm.encoder.width:
        told = f"was encoded by {item.model!r}, {width} wide, and this is {vlm.name!r}, {vlm.encoder.width} wide; encode it by this one"
        raise InputError(told, item=item.source)
    tokens = moved(item.tokens, device_of(vlm))
    return dataclasses.replace(_seen(item, tokens), full=item.full)


def _plan(encoder: VisionEncoder, item: Media, inside: _Inside[Plan], step: Step[Shortener | Pruner]) -> list[Plan]:
    full = encoder.count(item.size, _frames(item))
    budget = step.budget(full)
    return inside.plan(item.size, _frames(item), budget.count) if budget.count < full or not inside.exact else []


def _frames(item: Media) -> int:
    return len(item.frames) if isinstance(item, Video) else 1


def _seen(media: Media | Encoded, tokens: VisualTokens) -> Seen:
    audit = untouched(tokens).audit
    return Seen(len(tokens), tokens, Sight(media.source, tokens.grid, tokens.positions, tokens.saliency, audit, media.notes))


def _together(
    seen: Mapping[int, Sequence[Seen]], work: Callable[[Sequence[Seen], Sequence[int]], list[Good]]
) -> dict[int, list[Good] | MmsdkError]:
    """Work on the inputs of all rows, and the number of each one's row; row by row where that fails, to tell which it is."""
    try:
        done = iter(work([item for row in seen.values() for item in row], [index for index, row in seen.items() for _ in row]))
    except InputError:
        return {index: _alone(index, row, work) for index, row in seen.items()}
    return {index: [next(done) for _ in row] for index, row in seen.items()}


def _alone(index: int, row: Sequence[Seen], work: Callable[[Sequence[Seen], Sequence[int]], list[Good]]) -> list[Good] | MmsdkError:
    """Input by input, so that the error says which of them it is."""
    done = list[Good]()
    for place, item in enumerate(row):
        try:
            done += work([item], [index])
        except InputError as error:
            return _of(error, [one.sight.source for one in row], place).at(index)
    return done


def _of(error: InputError, sources: Sequence[str], place: int) -> InputError:
    """The error by the name of the input that it is about; of several with one name, by its number, too."""
    name = sources[place] if sources.count(sources[place]) == 1 else f"{sources[place]} ({place + 1} of {len(sources)})"
    return error if error.item else type(error)(error.message, item=name)


def _left(seen: Seen, compressed: Compressed) -> Seen:
    audit = compose(seen.sight.audit, compressed.audit)
    return Seen(seen.full, compressed.tokens, dataclasses.replace(seen.sight, audit=audit))


def _embedded(seen: Seen, embeddings: Float[Tensor, "n d"]) -> Seen:
    return dataclasses.replace(seen, tokens=dataclasses.replace(seen.tokens, features=embeddings))
