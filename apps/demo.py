"""The demo's content: three photographs and a clip that mini never saw in training, each with a question."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmsdk.answer import Answer
from mmsdk.apps.explain import draw
from mmsdk.pipeline import Pipeline
from mmsdk.vision.intake import load
from mmsdk.weights.bundle import pull

__all__ = ["ASKED", "Asked", "show"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about one file of a data bundle."""

    bundle: str
    file: str
    question: str

    @property
    def path(self) -> Path:
        """The file, fetched at first use."""
        return next(iter(pull(self.bundle).values())) / self.file


LONGEST = 48  # tokens of an answer
ASKED = (
    Asked("photos", "coffee.png", "What is in the picture?"),
    Asked("photos", "rocket.jpg", "What is in the picture?"),
    Asked("photos", "motorcycle_left.png", "Describe the picture."),
    Asked("clips", "carphone_pristine.mp4", "What happens in the clip?"),
)


def show(pipe: Pipeline, folder: Path, tell: Callable[[Asked, Answer, Path], None]) -> None:
    """Ask every question, write one annotated picture each into `folder`, and report through `tell` as answers come."""
    folder.mkdir(parents=True, exist_ok=True)
    for asked in ASKED:
        answer = pipe(asked.path, asked.question, max_tokens=LONGEST)
        picture = folder / f"{Path(asked.file).stem}.png"
        draw([load(asked.path)], answer.sights, f"{asked.question} {answer}").save(picture)
        tell(asked, answer, picture)
