"""Captions judged by what they name: the share of the things in a picture or clip that its description mentions."""

import re
from collections.abc import Sequence

import numpy as np

from mmsdk.apps.train_mini import vocabulary as words
from mmsdk.apps.train_mini.clips import Clip
from mmsdk.apps.train_mini.questions_robot import on_the_table
from mmsdk.apps.train_mini.scenes import Scene
from mmsdk.errors import MmsdkError
from mmsdk.pipeline import Pipeline
from mmsdk.vision.types import Media

__all__ = ["phrases", "recall", "recall_of"]

ASK_SCENE, ASK_CLIP = "Describe the picture.", "What happens?"
_LONGEST = 80
_BATCH = 8


def phrases(item: Scene | Clip) -> list[str]:
    """What a full description names, once each: "dog", "red circle", "the word"; empty where there is nothing to name.

    What a word says is asked by questions about reading, not here.
    """
    if isinstance(item, Clip):
        return list(dict.fromkeys(a.thing.phrase for a in item.actors))
    if item.photo is not None:
        return [item.photo[0]]
    if item.suite == "robot":
        return list(dict.fromkeys(t.name for t in on_the_table(item.things)))
    return list(dict.fromkeys(f"the {t.kind}" if t.kind in ("word", "number") else t.phrase for t in item.things))


def recall_of(text: str, wanted: Sequence[str]) -> float:
    """The share of `wanted` that occurs in `text` as whole words, in the singular or the plural."""
    hits = [any(re.search(rf"\b{re.escape(form)}\b", text) for form in (phrase, words.plural(phrase))) for phrase in wanted]
    return float(np.mean(hits))


def recall(pipe: Pipeline, items: Sequence[Scene | Clip], media: Sequence[Media | None]) -> float:
    """Mean recall of the descriptions that the pipeline gives of `media` (None: of nothing), judged by what `items` show."""
    asked = [
        (() if shown is None else shown, ASK_CLIP if isinstance(item, Clip) else ASK_SCENE)
        for item, shown in zip(items, media, strict=True)
    ]
    found = []
    for start in range(0, len(items), _BATCH):
        for answer, item in zip(pipe(asked[start : start + _BATCH], max_tokens=_LONGEST), items[start : start + _BATCH], strict=True):
            if isinstance(answer, MmsdkError):
                raise answer
            found.append(recall_of(answer, phrases(item)))
    return float(np.mean(found))
