"""Questions and answers, and the wording that all kinds of them share."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmsdk.apps.train_mini.scenes import Thing

__all__ = ["COUNTS", "QA", "by_name", "called", "listing", "one_of", "yes_or_no"]

COUNTS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")


@dataclass(frozen=True, slots=True)
class QA:
    """One question of a type (object, colour, count, place, relation, yes/no, reading, caption, direction, order, action)."""

    type: str
    question: str
    answer: str


def one_of(rng: np.random.Generator, options: Sequence[str]) -> str:
    """One of the options, each as likely."""
    return options[int(rng.integers(len(options)))]


def yes_or_no(flag: bool) -> str:
    """The answer to a yes/no question."""
    return "yes" if flag else "no"


def by_name(things: Sequence[Thing]) -> list[tuple[str, Thing]]:
    """Every thing that a name alone points to: by its noun where that is unique, else by colour and noun."""
    nouns, phrases = Counter(t.name for t in things), Counter(t.phrase for t in things)
    found = []
    for t in things:
        if t.kind in ("word", "number"):
            found.append((t.kind, t))
        elif nouns[t.name] == 1:
            found.append((t.name, t))
        elif phrases[t.phrase] == 1:
            found.append((t.phrase, t))
    return found


def called(thing: Thing) -> str:
    """The answer that names a thing; what a word or number says is asked by questions about reading alone."""
    return thing.kind if thing.kind in ("word", "number") else thing.phrase


def listing(parts: Sequence[str]) -> str:
    """Parts joined as English does: "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
