"""Questions with one right answer each, asked of a still scene, by type; a share of the answers is balanced on purpose."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from mmsdk.apps.train_mini import vocabulary as words
from mmsdk.apps.train_mini.questions_robot import about_robot
from mmsdk.apps.train_mini.scenes import Scene, Thing
from mmsdk.apps.train_mini.wording import COUNTS, QA, by_name, called, listing, one_of, yes_or_no

__all__ = ["about_scene"]


def _absent(rng: np.random.Generator, things: Sequence[Thing]) -> str:
    """A noun phrase that is not in the scene; half of the time a near miss (the colour of one shape, the form of another).

    Pairs that are held out never stand in for what is absent: training would teach that they do not exist.
    """
    nouns, phrases = {t.name for t in things}, {t.phrase for t in things}
    shapes = [t for t in things if t.kind == "shape"]
    if shapes and rng.random() < 0.5:
        base = shapes[int(rng.integers(len(shapes)))]
        for _ in range(8):
            near = (base.colour, one_of(rng, words.SHAPES)) if rng.random() < 0.5 else (one_of(rng, list(words.COLOURS)), base.name)
            if near not in words.HELD_OUT_SHAPES and " ".join(near) not in phrases:
                return " ".join(near)
    pool = [k.name for k in words.OBJECTS] if rng.random() < 0.7 else list(words.SHAPES)
    free = [n for n in pool if n not in nouns]
    return one_of(rng, free)


def _object(scene: Scene, rng: np.random.Generator) -> list[QA]:
    found, taken = [], {t.place: t for t in scene.things}
    spans = {p for t in scene.things if t.kind in ("word", "number") for p in _touched(t)}
    ask = ("What is {}?", "What can you see {}?", "What is {}?", "Which object is {}?", "Name the thing {}.")
    for place in words.PLACES:
        where = words.preposition(place)
        if place in taken:
            found.append(QA("object", one_of(rng, ask).format(where), called(taken[place])))
        elif place not in spans and rng.random() < 0.06:
            found.append(QA("object", f"What is {where}?", "nothing"))
    if len(scene.things) == 1:
        generic = ("What is this?", "What is in the picture?", "What do you see?", "What is on the table?", "Which object is shown?")
        found.append(QA("object", one_of(rng, generic), called(scene.things[0])))
    return found


def _touched(t: Thing) -> set[str]:
    return {words.place_of(min(0.999, max(0, x)), t.y) for x in (t.x - t.w / 2, t.x, t.x + t.w / 2)}


def _colour(scene: Scene, rng: np.random.Generator) -> list[QA]:
    """Of shapes always; of objects now and then, as their name alone mostly gives the colour away."""
    painted = [(n, t) for n, t in by_name(scene.things) if t.colour and t.kind in ("object", "shape") and t.colour not in n]
    named = [(n, t) for n, t in painted if t.kind == "shape" or rng.random() < 0.3]
    ask = ("What colour is the {}?", "Which colour is the {}?", "What color is the {}?", "What is the colour of the {}?")
    found = [QA("colour", one_of(rng, ask).format(n), t.colour) for n, t in named]
    if len(scene.things) == 1 and named:
        found.append(QA("colour", one_of(rng, ("Which colour?", "What colour is it?", "What color is it?")), named[0][1].colour))
    if scene.background and rng.random() < 0.35:
        found.append(QA("colour", one_of(rng, ("What colour is the background?", "Which colour is the background?")), scene.background))
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
            found.append(QA("count", one_of(rng, ask).format(words.plural(name)), COUNTS[n]))
    if rng.random() < 0.1:
        found.append(QA("count", one_of(rng, ask).format(words.plural(_absent(rng, scene.things))), COUNTS[0]))
    if len(things) == len(scene.things) and rng.random() < 0.5:
        generic = ("How many objects are there?", "How many things are in the picture?", "How many?", "How many things can you see?")
        found.append(QA("count", one_of(rng, generic), COUNTS[len(things)]))
    return found


def _place(scene: Scene, rng: np.random.Generator) -> list[QA]:
    ask = ("Where is the {}?", "Where is the {} in the picture?", "In which part of the picture is the {}?")
    return [QA("place", one_of(rng, ask).format(n), t.place) for n, t in by_name(scene.things)]


_SIDES: dict[str, Callable[[Thing, Thing], float]] = {
    "to the left of": lambda a, b: b.x - a.x, "to the right of": lambda a, b: a.x - b.x,
    "above": lambda a, b: b.y - a.y, "below": lambda a, b: a.y - b.y,
}  # fmt: skip
_CLEAR, _UNCLEAR = 0.15, 0.08


def _relation(scene: Scene, rng: np.random.Generator) -> list[QA]:
    named = by_name(scene.things)
    found: list[QA] = []
    if len(named) < 2 or len(named) != len(scene.things):
        return found
    for name, t in named:
        for side, gap in _SIDES.items():
            others = [u for _, u in named if u is not t]
            on_side = [u for u in others if gap(u, t) > _UNCLEAR]
            if len(on_side) == 1 and gap(on_side[0], t) > _CLEAR:
                ask = ("What is {} the {}?", "Which object is {} the {}?", "What can you see {} the {}?")
                found.append(QA("relation", one_of(rng, ask).format(side, name), called(on_side[0])))
    return found


def _yes_no(scene: Scene, rng: np.random.Generator) -> list[QA]:
    named = by_name(scene.things)
    present = [t for t in scene.things if t.kind in ("object", "shape")]
    ask = ("Is there {} in the picture?", "Is there {}?", "Can you see {}?", "Do you see {}?")
    found = []
    for i in rng.permutation(len(present))[:1]:
        t = present[int(i)]
        name = t.phrase if rng.random() < 0.6 else t.name
        found.append(QA("yes/no", one_of(rng, ask).format(words.article(name)), "yes"))
        found.append(QA("yes/no", one_of(rng, ask).format(words.article(_absent(rng, scene.things))), "no"))
    shapes = [(n, t) for n, t in named if t.kind == "shape" and t.colour not in n]
    for n, t in shapes[:1]:
        true = bool(rng.random() < 0.5)
        others = [c for c in words.COLOURS if c != t.colour and (c, t.name) not in words.HELD_OUT_SHAPES]
        colour = t.colour if true else one_of(rng, others)
        found.append(QA("yes/no", f"Is the {n} {colour}?", yes_or_no(true)))
    pairs = [(a, b) for a in named for b in named if a[1] is not b[1]]
    for i in rng.permutation(len(pairs))[:1]:
        (first, a), (second, b) = pairs[int(i)]
        side, gap = list(_SIDES.items())[int(rng.integers(4))]
        if abs(gap(a, b)) > _CLEAR:
            found.append(QA("yes/no", f"Is the {first} {side} the {second}?", yes_or_no(gap(a, b) > 0)))
    return found


def _reading(scene: Scene, rng: np.random.Generator) -> list[QA]:
    ask = {
        "word": ("What word is written?", "What does the sign say?", "Read the word.", "What is written in the picture?"),
        "number": ("What number is shown?", "Which number is written?", "Read the number.", "What is written in the picture?"),
    }
    return [QA("reading", one_of(rng, ask[t.kind]), t.name) for t in scene.things if t.kind in ask]


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
    return [QA("caption", one_of(rng, options), listing(parts))]


def _photo(scene: Scene, rng: np.random.Generator) -> list[QA]:
    assert scene.photo is not None
    noun, caption = scene.photo
    ask = ("What is this?", "What is in the picture?", "What do you see?", "What does the photo show?")
    other = one_of(rng, [n for n, _ in words.PHOTOS.values() if n != noun] + [k.name for k in words.OBJECTS if k.name != noun])
    exist = ("Is there {} in the picture?", "Can you see {}?")
    return [
        QA("photo", one_of(rng, ask), noun),
        QA("photo", one_of(rng, ("Describe the picture.", "Describe the photo.")), caption),
        QA("yes/no", one_of(rng, exist).format(words.article(noun)), "yes"),
        QA("yes/no", one_of(rng, exist).format(words.article(other)), "no"),
    ]


_SCENE_TYPES = (_object, _colour, _count, _place, _relation, _yes_no, _reading, _caption)


def about_scene(scene: Scene, rng: np.random.Generator, most: int | None = None) -> list[QA]:
    """All question types that the scene allows, each asked in a random wording; at most `most`, chosen at random, if given."""
    asks = (_photo,) if scene.photo else (about_robot,) if scene.suite == "robot" else _SCENE_TYPES
    found = [qa for ask in asks for qa in ask(scene, rng)]
    if most is not None and len(found) > most:
        found = [found[i] for i in sorted(rng.permutation(len(found))[:most])]
    return found
