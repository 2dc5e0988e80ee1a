"""Asking again on mini: from a cold copy nothing is encoded, from a memory in pages nothing that was shown is encoded or prefilled."""

import statistics
from dataclasses import dataclass, replace

import numpy as np

from mmsdk.answer import Answer
from mmsdk.apps.console import Cell
from mmsdk.compress import compression
from mmsdk.encoded import Given
from mmsdk.errors import InputError
from mmsdk.pipeline import Pipeline, pipeline
from mmsdk.recall import recalling
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
        """Rows {media, asked, encode_ms, compress_ms, prefill_ms, total_ms, kept, prompt, recalled}; what is asked is the same input.

        `asked` is the input "itself" each time, or its "cold copy", both by `compress`; without compression the "whole" of it each time, or
        in a memory in pages, which each round begins anew, "paged first" by one question and "paged again" by the others. Of `prompt`
        tokens, those of the first answer, `recalled` were not run again, the fewest of any answer. An answer is one token.
        """
        for name in ("repeats", "frames"):
            if getattr(self, name) < 1:
                raise InputError(f"it is {getattr(self, name)}, it must be at least 1", item=name)
        pipe = pipeline("image-text-to-text", compress=self.compress)
        whole = replace(pipe, compression=compression("identity"))
        draw = np.random.default_rng(0)
        clip = Frames(draw.integers(0, 256, (self.frames, 224, 224, 3), dtype=np.uint8), times=[i / 2 for i in range(self.frames)])
        media: dict[str, Source] = {"image": draw.integers(0, 256, (224, 224, 3), dtype=np.uint8), "clip": clip}
        rows: list[dict[str, Cell]] = []
        for name, source in media.items():
            seen = pipe.encode(source)
            for warm in (pipe, whole):
                warm(source, QUESTIONS[0], max_tokens=1)
            rows.append(_row(name, "itself", self._answers(pipe, source)))
            rows.append(_row(name, "cold copy", self._answers(pipe, seen)))
            rows.append(_row(name, "whole", self._answers(whole, source)))
            paged = [_asked(replace(whole, recall=recalling("paged")), source) for _ in range(self.repeats)]
            rows.append(_row(name, "paged first", [answers[0] for answers in paged]))
            rows.append(_row(name, "paged again", [answer for answers in paged for answer in answers[1:]]))
        return rows

    def _answers(self, pipe: Pipeline, given: Given) -> list[Answer]:
        return [answer for _ in range(self.repeats) for answer in _asked(pipe, given)]


def _asked(pipe: Pipeline, given: Given) -> list[Answer]:
    return [pipe(given, question, max_tokens=1) for question in QUESTIONS]


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
        "prompt": answers[0].tokens.prompt,
        "recalled": min(answer.tokens.recalled for answer in answers),
    }
