"""What a model sees of each question: media through the encoder, and what compression leaves of their tokens.

A batch goes through together. A row that fails becomes its error and leaves the others alone.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from mmsdk.answer import Sight
from mmsdk.compress import Compression, Entering, Step, named
from mmsdk.errors import BudgetError, InputError, MmsdkError, ModelError
from mmsdk.models.types import VLM
from mmsdk.prompt import Prompt
from mmsdk.tokencomp.audit import compose
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.plan import untouched
from mmsdk.tokencomp.types import Audit
from mmsdk.vision.shorten import Shortened, Shortener, Shortening, ShorteningEncoder
from mmsdk.vision.types import Media, Video, VisualTokens

__all__ = ["Seen", "compress", "encode", "parted"]

Good = TypeVar("Good")


@dataclass(frozen=True, slots=True)
class Seen:
    """One visual input on its way to the decoder: how many tokens it has in full, what is left of them, and their story so far.

    `counts` are the tokens that will be left after each cut inside the decoder.
    """

    full: int
    tokens: VisualTokens
    sight: Sight
    counts: tuple[int, ...] = ()


def encode(vlm: VLM, prompts: Mapping[int, Prompt], compression: Compression = Compression()) -> dict[int, list[Seen] | MmsdkError]:
    """Visual tokens of each row's media; all media of the batch go through the encoder together.

    A budget that the step inside the encoder cannot meet is that row's error. Raises ModelError where the encoder takes no such step.
    """
    if compression.inside_encoder:
        return _encode_shortened(vlm, prompts, compression.inside_encoder[0])
    tokens = iter(vlm.encoder([item for prompt in prompts.values() for item in prompt.media]))
    return {index: [_seen(item, next(tokens)) for item in prompt.media] for index, prompt in prompts.items()}


def compress(compression: Compression, seen: Mapping[int, Sequence[Seen]]) -> dict[int, list[Seen] | MmsdkError]:
    """Thin each row's visual inputs to what goes into the decoder; a budget that does not fit is that row's error.

    Inputs of all rows are planned for together; row by row only where one of them does not fit.
    """
    try:
        thinned = iter(_together(compression, [item for row in seen.values() for item in row]))
    except InputError:
        return {index: _thin(compression, index, row) for index, row in seen.items()}
    return {index: [next(thinned) for _ in row] for index, row in seen.items()}


def parted(results: Mapping[int, Good | MmsdkError]) -> tuple[dict[int, Good], dict[int, MmsdkError]]:
    """What went well and what did not."""
    good = {index: result for index, result in results.items() if not isinstance(result, MmsdkError)}
    return good, {index: result for index, result in results.items() if isinstance(result, MmsdkError)}


def _encode_shortened(vlm: VLM, prompts: Mapping[int, Prompt], step: Step[Shortener]) -> dict[int, list[Seen] | MmsdkError]:
    encoder = vlm.encoder
    if not isinstance(encoder, ShorteningEncoder):
        raise ModelError(f"{named(step.method)} works inside the encoder, and that of {vlm.name!r} cannot be shortened; leave it out")
    plans, unfit = parted({index: _plans(encoder, index, prompt.media, step) for index, prompt in prompts.items()})
    todo = [(item, plan) for index, row in plans.items() for item, plan in zip(prompts[index].media, row, strict=True)]
    whole = iter(encoder([item for item, plan in todo if not plan]))
    short = iter(encoder.shortened([item for item, plan in todo if plan], [plan for _, plan in todo if plan]))
    results = (_shortened(item, next(short), encoder, named(step.method)) if plan else _seen(item, next(whole)) for item, plan in todo)
    return {**{index: [next(results) for _ in row] for index, row in plans.items()}, **unfit}


def _shortened(item: Media, result: Shortened, encoder: ShorteningEncoder, method: str) -> Seen:
    tokens, owner = result.tokens, result.owner
    audit = Audit(method, owner, torch.zeros(len(owner), device=owner.device))
    sight = Sight(item.source, tokens.grid, result.positions, tokens.saliency[owner], audit, item.notes)
    return Seen(encoder.count(item.size, _frames(item)), tokens, sight)


def _plans(encoder: ShorteningEncoder, index: int, media: Sequence[Media], step: Step[Shortener]) -> list[list[Shortening]] | InputError:
    """How the encoder is shortened for each frame of each input of a row; not at all where the budget is all that there is."""
    try:
        return [_plan(encoder, item, step) for item in media]
    except BudgetError as error:
        return error.at(index)


def _plan(encoder: ShorteningEncoder, item: Media, step: Step[Shortener]) -> list[Shortening]:
    full = encoder.count(item.size, _frames(item))
    budget = Budget.of(step.amount, full)
    return encoder.plan(item.size, _frames(item), step.method, budget.count) if budget.count < full else []


def _frames(item: Media) -> int:
    return len(item.frames) if isinstance(item, Video) else 1


def _seen(media: Media, tokens: VisualTokens) -> Seen:
    audit = untouched(tokens).audit
    return Seen(len(tokens), tokens, Sight(media.source, tokens.grid, tokens.positions, tokens.saliency, audit, media.notes))


def _thin(compression: Compression, index: int, row: Sequence[Seen]) -> list[Seen] | MmsdkError:
    try:
        return _together(compression, row)
    except InputError as error:
        return error.at(index)


def _together(compression: Compression, seen: Sequence[Seen]) -> list[Seen]:
    entering = compression.entering([item.tokens for item in seen])
    return [_entered(*one) for one in zip(seen, entering, strict=True)]


def _entered(seen: Seen, entering: Entering) -> Seen:
    audit = compose(seen.sight.audit, entering.compressed.audit)
    return Seen(seen.full, entering.compressed.tokens, dataclasses.replace(seen.sight, audit=audit), entering.counts)
