"""Follow-up questions on mini: the first one encodes, the later ones choose from the cold copy, beside asking with the picture itself."""

import statistics
from dataclasses import dataclass

import numpy as np

from mmsdk.answer import Answer
from mmsdk.apps.console import Cell
from mmsdk.encoded import Given
from mmsdk.pipeline import Pipeline, pipeline
from mmsdk.vision.intake import Frames, Source

__all__ = ["Followup"]

QUESTIONS = ("What is in it?", "Which colour is the thing on the left?", "How many things are there?")


@dataclass(frozen=True, slots=True)
class Followup:
    """Medians over `repeats` rounds of three questions about a picture and about a clip of `frames`, pixels of noise, batch 1."""

    repeats: int = 5
    frames: int = 16
    compress: str = "simplecluster:0.1"

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {media, asked, encode_ms, compress_ms, prefill_ms, total_ms, kept}; `asked` is the picture itself or its cold copy."""
        pipe = pipeline("image-text-to-text", compress=self.compress)
        draw = np.random.default_rng(0)
        clip = Frames(draw.integers(0, 256, (self.frames, 224, 224, 3), dtype=np.uint8), times=[i / 2 for i in range(self.frames)])
        media: dict[str, Source] = {"image": draw.integers(0, 256, (224, 224, 3), dtype=np.uint8), "clip": clip}
        rows: list[dict[str, Cell]] = []
        for name, source in media.items():
            seen = pipe.encode(source)
            pipe(source, QUESTIONS[0], max_tokens=1)
            rows.append(_row(name, "itself", self._answers(pipe, source)))
            rows.append(_row(name, "cold copy", self._answers(pipe, seen)))
        return rows

    def _answers(self, pipe: Pipeline, given: Given) -> list[Answer]:
        return [pipe(given, question, max_tokens=1) for _ in range(self.repeats) for question in QUESTIONS]


def _row(media: str, asked: str, answers: list[Answer]) -> dict[str, Cell]:
    times = [answer.timings for answer in answers]
    return {
        "media": media,
        "asked": asked,
        "encode_ms": statistics.median(time.encode for time in times),
        "compress_ms": statistics.median(time.compress for time in times),
        "prefill_ms": statistics.median(time.prefill for time in times),
        "total_ms": statistics.median(time.total for time in times),
        "kept": answers[0].tokens.kept,
    }
