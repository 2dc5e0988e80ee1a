"""Pictures and clips that no training has seen, each encoded once, and short questions about them that have one right answer."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmsdk.apps.train_mini.clips import Clip
from mmsdk.apps.train_mini.features import Sample, draw, media_of
from mmsdk.apps.train_mini.scenes import Artist, Scene
from mmsdk.apps.train_mini.wording import QA
from mmsdk.encoded import Encoded
from mmsdk.models.types import VLM
from mmsdk.vision.types import Media

__all__ = ["Asked", "asked_about", "drawn"]

# Not asked: what mini cannot do with all tokens either (reading, counting), and what has no single answer (captions).
_TYPES = {"image": ("object", "colour", "place", "relation", "yes/no"), "clip": ("direction", "order", "object", "yes/no")}
_TOGETHER = 8


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A picture or a clip, its tokens, and what is asked about it."""

    media: Media
    encoded: Encoded
    questions: tuple[QA, ...]


def drawn(vlm: VLM, artist: Artist, kind: str, count: int, each: int, seed: int) -> list[Asked]:
    """`count` pictures or clips ("image", "clip") with up to `each` questions, over all of which the types come about equally often."""
    some = (4 * count, 0, 0) if kind == "image" else (0, 0, 4 * count)
    found = list(asked_about(draw(artist, seed, *some), kind, count, each, seed))
    groups = [found[at : at + _TOGETHER] for at in range(0, len(found), _TOGETHER)]
    tokens = [one for group in groups for one in vlm.encoder([media for media, _ in group])]
    return [Asked(media, Encoded.of(media, own, vlm.name), asked) for (media, asked), own in zip(found, tokens, strict=True)]


def asked_about(items: Iterator[Scene | Clip], kind: str, count: int, each: int, seed: int) -> Iterator[tuple[Media, tuple[QA, ...]]]:
    """Questions of the first `count` items that can be asked anything; each is of the type that was due for longest."""
    before: Counter[str] = Counter()
    for number, item in enumerate(items):
        sample = Sample(None, item) if isinstance(item, Clip) else Sample(item, None)
        known = dict.fromkeys(qa for qa in sample.questions(np.random.default_rng((seed, number))) if qa.type in _TYPES[kind])
        chosen = _due(list(known), before, each)
        if chosen:
            yield media_of(item), tuple(chosen)
            count -= 1
        if not count:
            return


def _due(known: Sequence[QA], before: Counter[str], most: int) -> list[QA]:
    left, chosen = list(known), list[QA]()
    while left and len(chosen) < most:
        due = min(left, key=lambda qa: before[qa.type])
        left.remove(due)
        chosen.append(due)
        before[due.type] += 1
    return chosen
