"""The demo's content: two photographs, a drawn scene and a clip, each with a question, and an episode of a robot.

The coffee, the scene and the clip were never seen in training; the cat was, in other crops.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import PIL.Image

from mmsdk.answer import Answer
from mmsdk.apps.explain import draw
from mmsdk.apps.robots.episodes import HELD_OUT, Condition, Ended, played
from mmsdk.apps.robots.film import Film
from mmsdk.pipeline import Pipeline
from mmsdk.vision.films import save_film
from mmsdk.vision.intake import load
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.default import default_policy
from mmsdk.vla.envs.metaworld import MetaWorld
from mmsdk.weights.bundle import pull

__all__ = ["ASKED", "TASK", "Asked", "act", "show"]

SHIPPED = Path(__file__).parent / "media"
LONGEST = 48  # tokens of an answer
TASK = "drawer-open-v3"


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about one file: of a data bundle, or (bundle "") one that ships with mmsdk."""

    bundle: str
    file: str
    question: str

    @property
    def path(self) -> Path:
        """The file, fetched at first use."""
        folder = next(iter(pull(self.bundle).values())) if self.bundle else SHIPPED
        return folder / self.file


ASKED = (
    Asked("photos", "chelsea.png", "What is in the picture?"),
    Asked("photos", "coffee.png", "What is in the picture?"),
    Asked("", "scene.png", "Describe the picture."),
    Asked("", "motion.mp4", "What happens?"),
)


def show(pipe: Pipeline, folder: Path, tell: Callable[[Asked, Answer, Path], None]) -> None:
    """Ask every question, write one annotated picture each into `folder`, and report through `tell` as answers come.

    overview.png, written last, holds them all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[PIL.Image.Image] = []
    for asked in ASKED:
        answer = pipe(asked.path, asked.question, max_tokens=LONGEST)
        picture = folder / f"{Path(asked.file).stem}.png"
        drawn.append(draw([load(asked.path)], answer.sights, asked.question, str(answer)))
        drawn[-1].save(picture)
        tell(asked, answer, picture)
    _overview(drawn).save(folder / "overview.png", optimize=True)


def act(path: Path) -> Ended:
    """The robot policy that ships opens a drawer, from where no training began, in simulation, filmed into `path`."""
    clock, film = SimulatedClock(), Film(HELD_OUT)
    with MetaWorld(TASK, clock) as robot:
        (ended,), _ = played(robot, clock, default_policy(), Condition("default"), [HELD_OUT], film)
    save_film(film.clip, path)
    return ended


def _overview(pictures: Sequence[PIL.Image.Image]) -> PIL.Image.Image:
    """One below the other, each row as wide as the widest; narrow ones share a row."""
    width = max(picture.width for picture in pictures)
    rows: list[list[PIL.Image.Image]] = []
    for picture in pictures:
        if rows and sum(p.width for p in rows[-1]) + picture.width <= width:
            rows[-1].append(picture)
        else:
            rows.append([picture])
    page = PIL.Image.new("RGB", (width, sum(max(p.height for p in row) for row in rows)), "white")
    top = 0
    for row in rows:
        left = 0
        for picture in row:
            page.paste(picture, (left, top))
            left += picture.width
        top += max(p.height for p in row)
    return page
