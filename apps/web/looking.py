"""What the tab of pictures computes, without the page: one visitor's picture, what is kept of it, and answers with their cost."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmsdk.answer import Answer, Sight
from mmsdk.apps.web.models import Models
from mmsdk.apps.web.noted import Noted
from mmsdk.encoded import Encoded
from mmsdk.errors import InputError
from mmsdk.kv.memory import Memory, memory_of
from mmsdk.recall import Recall, Sights
from mmsdk.stages import Clock, device_of, lay_out
from mmsdk.vision.intake import Limits, load_image
from mmsdk.vision.types import Image

__all__ = ["Choice", "Looker", "Said", "Upload", "checked_tokens", "named"]

LONGEST = 256  # tokens of an answer, at most


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that a visitor brought: where it lies here, and what the visitor calls it."""

    path: str
    name: str

    @staticmethod
    def of(file: Mapping[str, Any] | None, missing: str) -> "Upload":
        """From what Gradio says of it, which has checked that it really was uploaded. Raises InputError, by `missing`, for none."""
        if file is None:
            raise InputError("there is none yet; drop one into the frame", item=missing)
        return Upload(file["path"], file.get("orig_name") or file["path"])


@dataclass(frozen=True, slots=True)
class Choice:
    """What a visitor chose: a method and the share of tokens that it keeps, in percent; how keys and values, and weights, are kept."""

    method: str = "identity"
    share: int | float = 100.0
    kv: str = "dense"
    weights: str = "none"

    @property
    def spec(self) -> str:
        """The same as the words that `compress` takes."""
        return self.method if self.method == "identity" else f"{self.method}:{self.share / 100:.4f}"

    @property
    def full(self) -> "Choice":
        """The same with every token."""
        return Choice("identity", 100.0, self.kv, self.weights)


@dataclass(frozen=True, slots=True)
class Said:
    """An answer so far; at its end also the whole of it, and the MB that its keys and values take."""

    text: str
    answer: Answer | None = None
    megabytes: float = 0.0


@dataclass(slots=True)
class Looker:
    """One visitor's: the picture as it was last encoded, and what is remembered of it where the cache remembers.

    `stops` counts how often another event ended the answer that was being given.
    """

    shown: str = ""
    stops: int = 0
    media: Image | None = None
    encoded: dict[str, Encoded] = field(default_factory=dict)
    memories: dict[tuple[str, str], tuple[Memory, Sights]] = field(default_factory=dict)

    def show(self, upload: Upload, limits: Limits) -> Image:
        """The picture; decoded once. Raises InputError, naming it as the visitor does."""
        if upload.path != self.shown or self.media is None:
            self.media, self.shown = _picture(upload, limits), upload.path
            self.encoded.clear()
            self.memories.clear()
        return self.media

    def look(self, models: Models, question: str, choice: Choice) -> Sight:
        """What a method keeps of the picture for a question, without an answer. Raises as a pipeline does."""
        assert self.media is not None, "a picture is shown first"
        pipe = models.pipe(choice.weights, choice.spec)
        with models.turn:
            given = self.media if pipe.compression.inside_encoder else self._encoded(models, choice.weights)
            item = (given, question.strip() or "What is it?")
            laid = lay_out(pipe.vlm, pipe.compression, [item], 1, Clock(device_of(pipe.vlm)))
        for error in laid.errors.values():
            raise error.at(None) if isinstance(error, InputError) else error
        (row,) = laid.rows.values()
        return row.sights[0]

    def ask(self, models: Models, picture: Image, question: str, choice: Choice, tokens: int, began: int) -> Iterator[Said]:
        """The answer about what `show` gave, piece by piece, at its end whole, unless it is stopped. Raises as a pipeline does.

        `began` is what `stops` was when this was asked for.

        The models' `turn` is held while something is computed, and only then.
        """
        memory, sights = self._memory(choice)
        noted = Noted(memory)
        pipe = models.pipe(choice.weights, choice.spec, Recall(noted, sights))
        with models.turn:
            pieces = pipe.stream(picture, question, max_tokens=tokens)
        text = ""
        with closing(pieces):
            while self.stops == began:
                with models.turn:
                    piece = next(pieces, None)
                if piece is None:
                    yield Said(text, pieces.answer, noted.megabytes)
                    return
                text += piece
                yield Said(text)

    def _encoded(self, models: Models, weights: str) -> Encoded:
        if weights in self.encoded:
            return self.encoded[weights]
        picture = self.media
        assert picture is not None, "a picture is shown first"
        encoded = models.pipe(weights).encode(picture)
        if picture is self.media:
            # else another one was shown meanwhile
            self.encoded[weights] = encoded
        return encoded

    def _memory(self, choice: Choice) -> tuple[Memory, Sights]:
        """A memory of this visitor's own; of those that remember, the latest kind is kept."""
        key = choice.weights, choice.kv
        if key not in self.memories:
            self.memories.clear()
            memory = memory_of(choice.kv)
            self.memories[key] = memory, Sights(2**25 if memory.page else 0)
        return self.memories[key]


def named(error: InputError, name: str) -> InputError:
    """The same error with the visitor's name for the thing: where an upload lies is nobody's business."""
    return type(error)(error.message, item=Path(name).name)


def checked_tokens(tokens: int | float) -> int:
    """How long an answer may be. Raises InputError."""
    if not 1 <= tokens <= LONGEST:
        raise InputError(f"{tokens:g} tokens, expected from 1 to {LONGEST}", item="length")
    return int(tokens)


def _picture(upload: Upload, limits: Limits) -> Image:
    try:
        return load_image(upload.path, limits=limits)
    except InputError as error:
        raise named(error, upload.name) from error
