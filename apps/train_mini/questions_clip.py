"""Questions about a clip: direction, order of events, counting over time, what moves; each has one right answer."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mmsdk.apps.train_mini import vocabulary as words
from mmsdk.apps.train_mini.clips import Actor, Clip
from mmsdk.apps.train_mini.wording import COUNTS, QA, by_name, listing, one_of, yes_or_no

__all__ = ["about_clip"]

_WAYS = ("left", "right", "up", "down")


def _motion_questions(clip: Clip, named: Sequence[tuple[str, Actor]], rng: np.random.Generator) -> list[QA]:
    found = []
    movers = [(n, a) for n, a in named if a.motion != "still"]
    still = [(n, a) for n, a in named if a.motion == "still"]
    ask = ("Which way does the {} move?", "In which direction does the {} move?", "Where does the {} go?", "Which way is the {} moving?")
    for n, a in movers:
        found.append(QA("direction", one_of(rng, ask).format(n), a.motion))
        claim = one_of(rng, [m for m in _WAYS if m != a.motion]) if rng.random() < 0.5 else a.motion
        found.append(QA("yes/no", f"Does the {n} move {claim}?", yes_or_no(claim == a.motion)))
    if len(movers) == 1 == len(named):
        found.append(QA("direction", "Which way does it move?", movers[0][1].motion))
    elif len(movers) == 1:
        found.append(QA("object", one_of(rng, ("What is moving?", "What moves?", "Which object moves?")), movers[0][1].thing.phrase))
    if len(still) == 1:
        found.append(QA("object", one_of(rng, ("What stays still?", "What does not move?")), still[0][1].thing.phrase))
    for n, a in named:
        if rng.random() < 0.5:
            found.append(QA("yes/no", f"Is the {n} moving?", yes_or_no(a.motion != "still")))
    return found


def _order_questions(clip: Clip, named: Sequence[tuple[str, Actor]], rng: np.random.Generator) -> list[QA]:
    order = sorted(named, key=lambda pair: pair[1].first)
    found = [
        QA("order", one_of(rng, ("What appears first?", "Which object comes first?", "What is shown first?")), order[0][1].thing.phrase),
        QA("order", one_of(rng, ("What appears last?", "Which object comes last?", "What is shown last?")), order[-1][1].thing.phrase),
        QA("count", one_of(rng, ("How many objects appear?", "How many things appear?")), COUNTS[len(order)]),
    ]
    for (before, _), (after, b) in pairwise(order):
        found.append(QA("order", f"What appears right after the {before}?", b.thing.phrase))
        flip = bool(rng.random() < 0.5)
        first, second = (after, before) if flip else (before, after)
        found.append(QA("order", f"Does the {first} appear before the {second}?", yes_or_no(not flip)))
    return found


def _blink_questions(clip: Clip, named: Sequence[tuple[str, Actor]], rng: np.random.Generator) -> list[QA]:
    name, actor = named[0]
    question = one_of(rng, ("How many times does the {} appear?", "How often does the {} appear?")).format(name)
    return [QA("count", question, COUNTS[actor.showings])]


def _story(clip: Clip) -> str:
    names = [words.article(a.thing.phrase) for a in clip.actors]
    if clip.story == "order":
        first, *rest = [n for _, n in sorted(zip([a.first for a in clip.actors], names, strict=True))]
        return f"{first} appears" + "".join(f", then {n}" for n in rest)
    if clip.story == "blink":
        return f"{names[0]} appears {COUNTS[clip.actors[0].showings]} times" if clip.actors[0].showings > 1 else f"{names[0]} appears once"
    motions = [actor.motion for actor in clip.actors]
    return listing([f"{n} stays still" if motion == "still" else f"{n} moves {motion}" for n, motion in zip(names, motions, strict=True)])


def about_clip(clip: Clip, rng: np.random.Generator) -> list[QA]:
    """Direction, order, counting over time, what moves, and a caption (or, for robot clips, the action)."""
    if clip.story == "robot":
        ask = ("What is the robot doing?", "What happens?", "What does the robot arm do?", "Describe the video.")
        return [QA("action", one_of(rng, ask), clip.action)]
    by_thing = {id(a.thing): a for a in clip.actors}
    named = [(n, by_thing[id(t)]) for n, t in by_name([a.thing for a in clip.actors])]
    if len(named) != len(clip.actors):
        return []
    asks = {"motion": _motion_questions, "order": _order_questions, "blink": _blink_questions}[clip.story]
    ask = ("What happens?", "Describe the video.", "What happens in the video?", "Describe the clip.")
    return [*asks(clip, named, rng), QA("caption", one_of(rng, ask), _story(clip))]
