"""Questions about a rendered robot scene: what lies on the table, where, in which colour."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mmsdk.apps.train_mini import vocabulary as words
from mmsdk.apps.train_mini.scenes import Scene, Thing
from mmsdk.apps.train_mini.wording import QA, listing, one_of

__all__ = ["about_robot", "on_the_table"]

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


def about_robot(scene: Scene, rng: np.random.Generator) -> list[QA]:
    """A rendered robot scene: what lies on the table, where, in which colour; as many yes as no.

    A description names the things first, as that of any scene does, and where they are last: begun with the robot arm, it made the model
    decide on the kind of picture before it looked, and pictures on photographs were described as tables too.
    """
    counts = Counter(t.name for t in scene.things)
    things = on_the_table(scene.things)
    found: list[QA] = []
    if things:
        listed = listing([words.article(t.name) for t in things])
        ask = ("What is on the table?", "Which objects are on the table?", "What is in front of the robot?")
        found.append(QA("caption", one_of(rng, ask), listed))
        if len(things) == 1:
            found.append(QA("object", one_of(rng, ("Which object is on the table?", "Name the object on the table.")), things[0].name))
        placed = listing([f"{words.article(t.name)} {words.preposition(t.place)}" for t in things])
        found.append(QA("caption", one_of(rng, ("Describe the picture.", "Describe the scene.")), f"{placed}, on a table with a robot arm"))
    for t in things:
        found.append(QA("place", f"Where is the {t.name}?", t.place))
        if t.colour:
            found.append(QA("colour", one_of(rng, ("What colour is the {}?", "What color is the {}?")).format(t.name), t.colour))
    exist = ("Is there {} in the picture?", "Is there {}?", "Can you see {}?", "Do you see {}?")
    absent = [n for n in _ON_TABLES if n not in counts]
    for t, other in zip(things[:2], rng.permutation(len(absent)), strict=False):
        found.append(QA("yes/no", one_of(rng, exist).format(words.article(t.name)), "yes"))
        found.append(QA("yes/no", one_of(rng, exist).format(words.article(absent[int(other)])), "no"))
    return found
