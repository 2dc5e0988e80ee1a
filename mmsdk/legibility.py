"""What compression left of each input: how much of its tokens, and the guard over writing.

A picture that is about its text, left with too few tokens to read it, is told, never passed over.

Writing is what compression loses first. Starved is a picture full of writing of which more than half of the encoder's tokens have none
among the kept that is alike (cosine 0.9; of merged tokens the group's mean is looked at), and one that fewer than a tenth of them are left
of, since an encoder that hardly reads takes all lines for alike. Where the encoder itself was shortened there are no full tokens to compare
with, and less than a quarter kept counts as starved. All bounds are ours.
"""

import dataclasses
import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.answer import Sight
from mmsdk.encoded import Encoded
from mmsdk.errors import InputError
from mmsdk.seeing import Seen
from mmsdk.tokencomp.fidelity import Fidelity, preserved
from mmsdk.vision.types import Media, Video
from mmsdk.vision.writing import writing

__all__ = ["LegibilityWarning", "guarded"]

ALIKE, COVERED, FEW, SHARE = 0.9, 0.5, 0.1, 0.25


class LegibilityWarning(UserWarning):
    """A picture that is full of writing was left with too few visual tokens to read it.

    Where a program makes warnings errors, it is the error of that picture's question, as an InputError.
    """


def guarded(media: Sequence[Media | Encoded], seen: Sequence[Seen], sights: Sequence[Sight]) -> tuple[Sight, ...]:
    """The sights of a row, `seen` by the encoder, with their fidelity, and a note on each picture whose writing the budget starves.

    The same note is given as a LegibilityWarning; InputError where the program has made that an error. What was kept whole is not looked
    at, and clips for their fidelity alone.
    """
    return tuple(_guarded(*one) for one in zip(media, seen, sights, strict=True))


def _guarded(media: Media | Encoded, seen: Seen, sight: Sight) -> Sight:
    # looked at only where something was compressed: of mini's inputs it takes a millisecond or two
    if sight.audit.method == "identity":
        return sight
    kept = int(sight.audit.assignment.max()) + 1
    told = dataclasses.replace(sight, fidelity=_fidelity(seen, sight, kept))
    note = _starved(seen, told, kept) if kept < seen.full and _is_dense(media) else ""
    if not note:
        return told
    try:
        warnings.warn(f"{sight.source}: {note}", LegibilityWarning, stacklevel=2)
    except LegibilityWarning as warning:
        # an error of this row, and of no other of its batch
        raise InputError(note, item=sight.source) from warning
    return dataclasses.replace(told, notes=(*sight.notes, note))


def _is_dense(media: Media | Encoded) -> bool:
    if isinstance(media, Encoded):
        return media.writing.dense
    return not isinstance(media, Video) and writing(media.pixels).dense


def _fidelity(seen: Seen, sight: Sight, kept: int) -> Fidelity | None:
    if len(sight.audit.assignment) != len(seen.tokens):
        return None
    if kept == len(seen.tokens):
        return sight.fidelity
    return preserved(seen.tokens.features, _kept(seen, sight, kept), sight.audit.assignment, ALIKE)


def _starved(seen: Seen, sight: Sight, kept: int) -> str:
    """What is to be said, or nothing."""
    told = f"this picture is full of writing, and {kept} of its {seen.full} visual tokens"
    if sight.fidelity is not None and sight.fidelity.coverage < COVERED:
        return f"{told} cover {sight.fidelity.coverage:.0%} of it (cosine {ALIKE}); keep more to have it read"
    least = SHARE if sight.fidelity is None else FEW
    return f"{told} are kept; keep more to have it read" if kept < least * seen.full else ""


def _kept(seen: Seen, sight: Sight, kept: int) -> Float[Tensor, "k d"]:
    """What stands for each kept token: the mean of those that became it."""
    owner = sight.audit.assignment
    stays = owner >= 0
    features = seen.tokens.features[stays].float()
    sums = features.new_zeros(kept, features.shape[1]).index_add_(0, owner[stays], features)
    return sums / torch.bincount(owner[stays], minlength=kept).clamp_min(1)[:, None]
