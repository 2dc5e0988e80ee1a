"""Questions with one right answer each, asked of a scene or a clip, by type; a share of the answers is balanced on purpose."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mmsdk.apps.train_mini import vocabulary as words
from mmsdk.apps.train_mini.clips import Actor, Clip
from mmsdk.apps.train_mini.scenes import Scene, Thing

__all__ = ["COUNTS", "QA", "about_clip", "about_scene", "on_the_table"]

COUNTS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")


@dataclass(frozen=True, slots=True)
class QA:
    """One question of a type (object, colour, count, place, relation, yes/no, reading, caption, direction, order, action)."""

    type: str
    question: str
    answer: str


def _one(rng: np.random.Generator, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _named(things: Sequence[Thing]) -> list[tuple[str, Thing]]:
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


def _called(thing: Thing) -> str:
    """The answer that names a thing; what a word or number says is asked by questions about reading alone."""
    return thing.kind if thing.kind in ("word", "number") else thing.phrase


def _absent(rng: np.random.Generator, things: Sequence[Thing]) -> str:
    """A noun phrase that is not in the scene; half of the time a near miss (the colour of one shape, the form of another).

    Pairs that are held out never stand in for what is absent: training would teach that they do not exist.
    """
    nouns, phrases = {t.name for t in things}, {t.phrase for t in things}
    shapes = [t for t in things if t.kind == "shape"]
    if shapes and rng.random() < 0.5:
        base = shapes[int(rng.integers(len(shapes)))]
        for _ in range(8):
            near = (base.colour, _one(rng, words.SHAPES)) if rng.random() < 0.5 else (_one(rng, list(words.COLOURS)), base.name)
            if near not in words.HELD_OUT_SHAPES and " ".join(near) not in phrases:
                return " ".join(near)
    pool = [k.name for k in words.OBJECTS] if rng.random() < 0.7 else list(words.SHAPES)
    free = [n for n in pool if n not in nouns]
    return _one(rng, free)


def _object(scene: Scene, rng: np.random.Generator) -> list[QA]:
    found, taken = [], {t.place: t for t in scene.things}
    spans = {p for t in scene.things if t.kind in ("word", "number") for p in _touched(t)}
    ask = ("What is {}?", "What can you see {}?", "What is {}?", "Which object is {}?", "Name the thing {}.")
    for place in words.PLACES:
        where = words.preposition(place)
        if place in taken:
            found.append(QA("object", _one(rng, ask).format(where), _called(taken[place])))
        elif place not in spans and rng.random() < 0.06:
            found.append(QA("object", f"What is {where}?", "nothing"))
    if len(scene.things) == 1:
        generic = ("What is this?", "What is in the picture?", "What do you see?", "What is on the table?", "Which object is shown?")
        found.append(QA("object", _one(rng, generic), _called(scene.things[0])))
    return found


def _touched(t: Thing) -> set[str]:
    return {words.place_of(min(0.999, max(0, x)), t.y) for x in (t.x - t.w / 2, t.x, t.x + t.w / 2)}


def _colour(scene: Scene, rng: np.random.Generator) -> list[QA]:
    """Of shapes always; of objects now and then, as their name alone mostly gives the colour away."""
    painted = [(n, t) for n, t in _named(scene.things) if t.colour and t.kind in ("object", "shape") and t.colour not in n]
    named = [(n, t) for n, t in painted if t.kind == "shape" or rng.random() < 0.3]
    ask = ("What colour is the {}?", "Which colour is the {}?", "What color is the {}?", "What is the colour of the {}?")
    found = [QA("colour", _one(rng, ask).format(n), t.colour) for n, t in named]
    if len(scene.things) == 1 and named:
        found.append(QA("colour", _one(rng, ("Which colour?", "What colour is it?", "What color is it?")), named[0][1].colour))
    if scene.background and rng.random() < 0.35:
        found.append(QA("colour", _one(rng, ("What colour is the background?", "Which colour is the background?")), scene.background))
    return found


def _count(scene: Scene, rng: np.random.Generator) -> list[QA]:
    things = [t for t in scene.things if t.kind in ("object", "shape")]
    totals: Counter[str] = Counter()
    for t in things:
        totals[t.name] += 1
        if t.kind == "shape":
            totals[f"{t.colour} {t.name}"] += 1
    ask = ("How many {} are there?", "How many {} can you see?", "How many {} are in the picture?", "Count the {}.")
    found = []
    for name, n in totals.items():
        if n > 1 or rng.random() < 0.12:
            found.append(QA("count", _one(rng, ask).format(words.plural(name)), COUNTS[n]))
    if rng.random() < 0.1:
        found.append(QA("count", _one(rng, ask).format(words.plural(_absent(rng, scene.things))), COUNTS[0]))
    if len(things) == len(scene.things) and rng.random() < 0.5:
        generic = ("How many objects are there?", "How many things are in the picture?", "How many?", "How many things can you see?")
        found.append(QA("count", _one(rng, generic), COUNTS[len(things)]))
    return found


def _place(scene: Scene, rng: np.random.Generator) -> list[QA]:
    ask = ("Where is the {}?", "Where is the {} in the picture?", "In which part of the picture is the {}?")
    return [QA("place", _one(rng, ask).format(n), t.place) for n, t in _named(scene.things)]


_SIDES: dict[str, Callable[[Thing, Thing], float]] = {
    "to the left of": lambda a, b: b.x - a.x, "to the right of": lambda a, b: a.x - b.x,
    "above": lambda a, b: b.y - a.y, "below": lambda a, b: a.y - b.y,
}  # fmt: skip
_CLEAR, _UNCLEAR = 0.15, 0.08


def _relation(scene: Scene, rng: np.random.Generator) -> list[QA]:
    named = _named(scene.things)
    found: list[QA] = []
    if len(named) < 2 or len(named) != len(scene.things):
        return found
    for name, t in named:
        for side, gap in _SIDES.items():
            others = [u for _, u in named if u is not t]
            on_side = [u for u in others if gap(u, t) > _UNCLEAR]
            if len(on_side) == 1 and gap(on_side[0], t) > _CLEAR:
                ask = ("What is {} the {}?", "Which object is {} the {}?", "What can you see {} the {}?")
                found.append(QA("relation", _one(rng, ask).format(side, name), _called(on_side[0])))
    return found


def _yes_no(scene: Scene, rng: np.random.Generator) -> list[QA]:
    named = _named(scene.things)
    present = [t for t in scene.things if t.kind in ("object", "shape")]
    ask = ("Is there {} in the picture?", "Is there {}?", "Can you see {}?", "Do you see {}?")
    found = []
    for i in rng.permutation(len(present))[:1]:
        t = present[int(i)]
        name = t.phrase if rng.random() < 0.6 else t.name
        found.append(QA("yes/no", _one(rng, ask).format(words.article(name)), "yes"))
        found.append(QA("yes/no", _one(rng, ask).format(words.article(_absent(rng, scene.things))), "no"))
    shapes = [(n, t) for n, t in named if t.kind == "shape" and t.colour not in n]
    for n, t in shapes[:1]:
        true = bool(rng.random() < 0.5)
        others = [c for c in words.COLOURS if c != t.colour and (c, t.name) not in words.HELD_OUT_SHAPES]
        colour = t.colour if true else _one(rng, others)
        found.append(QA("yes/no", f"Is the {n} {colour}?", _yes(true)))
    pairs = [(a, b) for a in named for b in named if a[1] is not b[1]]
    for i in rng.permutation(len(pairs))[:1]:
        (first, a), (second, b) = pairs[int(i)]
        side, gap = list(_SIDES.items())[int(rng.integers(4))]
        if abs(gap(a, b)) > _CLEAR:
            found.append(QA("yes/no", f"Is the {first} {side} the {second}?", _yes(gap(a, b) > 0)))
    return found


def _reading(scene: Scene, rng: np.random.Generator) -> list[QA]:
    ask = {
        "word": ("What word is written?", "What does the sign say?", "Read the word.", "What is written in the picture?"),
        "number": ("What number is shown?", "Which number is written?", "Read the number.", "What is written in the picture?"),
    }
    return [QA("reading", _one(rng, ask[t.kind]), t.name) for t in scene.things if t.kind in ask]


def _listing(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _caption(scene: Scene, rng: np.random.Generator) -> list[QA]:
    ask = ("Describe the picture.", "What is in the picture?", "Describe the image.", "What objects are there?", "Caption this picture.")
    counts = Counter(t.phrase for t in scene.things)
    parts, seen = [], set()
    for t in scene.things:
        if t.phrase in seen:
            continue
        seen.add(t.phrase)
        if counts[t.phrase] > 1:
            parts.append(f"{COUNTS[counts[t.phrase]]} {words.plural(t.phrase)}")
        else:
            noun = t.phrase if t.kind in ("word", "number") else words.article(t.phrase)
            parts.append(f"{noun} {words.preposition(t.place)}")
    options = ask if len(scene.things) > 1 else ask[:1] + ask[2:3] + ask[4:]
    return [QA("caption", _one(rng, options), _listing(parts))]


def _photo(scene: Scene, rng: np.random.Generator) -> list[QA]:
    assert scene.photo is not None
    noun, caption = scene.photo
    ask = ("What is this?", "What is in the picture?", "What do you see?", "What does the photo show?")
    other = _one(rng, [n for n, _ in words.PHOTOS.values() if n != noun] + [k.name for k in words.OBJECTS if k.name != noun])
    exist = ("Is there {} in the picture?", "Can you see {}?")
    return [
        QA("photo", _one(rng, ask), noun),
        QA("photo", _one(rng, ("Describe the picture.", "Describe the photo.")), caption),
        QA("yes/no", _one(rng, exist).format(words.article(noun)), "yes"),
        QA("yes/no", _one(rng, exist).format(words.article(other)), "no"),
    ]


_ROBOT_PARTS = ("table", "robot arm", "gripper", "target", "goal")
_ON_TABLES = tuple(
    """handle handle handle handle box box box block block block cabinet cabinet button button puck puck wall wall door plate mug peg
    window drawer bottle faucet stick ring hammer shelf basketball lever lid bin""".split()
)
"""What lies on the tables of the simulators, each about as often as it does: what is absent is drawn from the same things."""


def on_the_table(things: Sequence[Thing]) -> list[Thing]:
    """What a rendered robot scene is asked about: things that are no part of the robot and have a name of their own."""
    counts = Counter(t.name for t in things)
    return [t for t in things if t.name not in _ROBOT_PARTS and counts[t.name] == 1]


def _robot(scene: Scene, rng: np.random.Generator) -> list[QA]:
    """A rendered robot scene: what lies on the table, where, in which colour; as many yes as no."""
    counts = Counter(t.name for t in scene.things)
    things = on_the_table(scene.things)
    found: list[QA] = []
    if things:
        listing = _listing([words.article(t.name) for t in things])
        ask = ("What is on the table?", "Which objects are on the table?", "What is in front of the robot?")
        found.append(QA("object", _one(rng, ask), things[0].name) if len(things) == 1 else QA("caption", _one(rng, ask), listing))
        found.append(QA("caption", _one(rng, ("Describe the picture.", "Describe the scene.")), f"a robot arm and a table with {listing}"))
    for t in things:
        found.append(QA("place", f"Where is the {t.name}?", t.place))
        if t.colour:
            found.append(QA("colour", _one(rng, ("What colour is the {}?", "What color is the {}?")).format(t.name), t.colour))
    exist = ("Is there {} in the picture?", "Is there {}?", "Can you see {}?", "Do you see {}?")
    absent = [n for n in _ON_TABLES if n not in counts]
    for t, other in zip(things[:2], rng.permutation(len(absent)), strict=False):
        found.append(QA("yes/no", _one(rng, exist).format(words.article(t.name)), "yes"))
        found.append(QA("yes/no", _one(rng, exist).format(words.article(absent[int(other)])), "no"))
    return found


_SCENE_TYPES = (_object, _colour, _count, _place, _relation, _yes_no, _reading, _caption)


def about_scene(scene: Scene, rng: np.random.Generator, most: int | None = None) -> list[QA]:
    """All question types that the scene allows, each asked in a random wording; at most `most`, chosen at random, if given."""
    asks = (_photo,) if scene.photo else (_robot,) if scene.suite == "robot" else _SCENE_TYPES
    found = [qa for ask in asks for qa in ask(scene, rng)]
    if most is not None and len(found) > most:
        found = [found[i] for i in sorted(rng.permutation(len(found))[:most])]
    return found


def _motion_questions(clip: Clip, named: Sequence[tuple[str, Actor]], rng: np.random.Generator) -> list[QA]:
    found = []
    movers = [(n, a) for n, a in named if a.motion != "still"]
    still = [(n, a) for n, a in named if a.motion == "still"]
    ask = ("Which way does the {} move?", "In which direction does the {} move?", "Where does the {} go?", "Which way is the {} moving?")
    for n, a in movers:
        found.append(QA("direction", _one(rng, ask).format(n), a.motion))
        claim = _one(rng, ("left", "right", "up", "down")) if rng.random() < 0.5 else a.motion
        found.append(QA("yes/no", f"Does the {n} move {claim}?", _yes(claim == a.motion)))
    if len(movers) == 1 == len(named):
        found.append(QA("direction", "Which way does it move?", movers[0][1].motion))
    elif len(movers) == 1:
        found.append(QA("object", _one(rng, ("What is moving?", "What moves?", "Which object moves?")), movers[0][1].thing.phrase))
    if len(still) == 1:
        found.append(QA("object", _one(rng, ("What stays still?", "What does not move?")), still[0][1].thing.phrase))
    for n, a in named:
        if rng.random() < 0.5:
            found.append(QA("yes/no", f"Is the {n} moving?", _yes(a.motion != "still")))
    return found


def _order_questions(clip: Clip, named: Sequence[tuple[str, Actor]], rng: np.random.Generator) -> list[QA]:
    order = sorted(named, key=lambda pair: pair[1].first)
    found = [
        QA("order", _one(rng, ("What appears first?", "Which object comes first?", "What is shown first?")), order[0][1].thing.phrase),
        QA("order", _one(rng, ("What appears last?", "Which object comes last?", "What is shown last?")), order[-1][1].thing.phrase),
        QA("count", _one(rng, ("How many objects appear?", "How many things appear?")), COUNTS[len(order)]),
    ]
    for (before, _), (after, b) in pairwise(order):
        found.append(QA("order", f"What appears right after the {before}?", b.thing.phrase))
        flip = bool(rng.random() < 0.5)
        first, second = (after, before) if flip else (before, after)
        found.append(QA("order", f"Does the {first} appear before the {second}?", _yes(not flip)))
    return found


def _blink_questions(clip: Clip, named: Sequence[tuple[str, Actor]], rng: np.random.Generator) -> list[QA]:
    name, actor = named[0]
    question = _one(rng, ("How many times does the {} appear?", "How often does the {} appear?")).format(name)
    return [QA("count", question, COUNTS[actor.showings])]


def _story(clip: Clip) -> str:
    names = [words.article(a.thing.phrase) for a in clip.actors]
    if clip.story == "order":
        first, *rest = [n for _, n in sorted(zip([a.first for a in clip.actors], names, strict=True))]
        return f"{first} appears" + "".join(f", then {n}" for n in rest)
    if clip.story == "blink":
        return f"{names[0]} appears {COUNTS[clip.actors[0].showings]} times" if clip.actors[0].showings > 1 else f"{names[0]} appears once"
    motions = [actor.motion for actor in clip.actors]
    return _listing([f"{n} stays still" if motion == "still" else f"{n} moves {motion}" for n, motion in zip(names, motions, strict=True)])


def about_clip(clip: Clip, rng: np.random.Generator) -> list[QA]:
    """Direction, order, counting over time, what moves, and a caption (or, for robot clips, the action)."""
    if clip.story == "robot":
        ask = ("What is the robot doing?", "What happens?", "What does the robot arm do?", "Describe the video.")
        return [QA("action", _one(rng, ask), clip.action)]
    by_thing = {id(a.thing): a for a in clip.actors}
    named = [(n, by_thing[id(t)]) for n, t in _named([a.thing for a in clip.actors])]
    if len(named) != len(clip.actors):
        return []
    asks = {"motion": _motion_questions, "order": _order_questions, "blink": _blink_questions}[clip.story]
    ask = ("What happens?", "Describe the video.", "What happens in the video?", "Describe the clip.")
    return [*asks(clip, named, rng), QA("caption", _one(rng, ask), _story(clip))]
