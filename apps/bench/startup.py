"""Startup: how long a person waits before anything happens: imports, help, loading the default model, the first and a later answer."""

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from mmsdk.apps.console import Cell
from mmsdk.apps.demo import SHIPPED
from mmsdk.pipeline import Pipeline, pipeline

__all__ = ["Startup"]

LONGEST = 48  # tokens of an answer
# A question that takes a few words, and one that is answered by a sentence, about the demo's drawn scene.
QUESTIONS = ("What is at the top?", "Describe the picture.")


@dataclass(frozen=True, slots=True)
class Startup:
    """Medians of `repeats` runs; processes are fresh, files are warm in the system's cache after the first."""

    repeats: int = 5
    model: str = "mini"

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {what, seconds, dtype, tokens}: the number format of the weights, and how many tokens were generated, or none."""
        return [
            _row("import mmsdk", self._process("import mmsdk") - self._process("pass")),
            _row("mmsdk --help", self._help([])),
            _row("mmsdk ask --help", self._help(["ask"])),
            *self._answers(),
        ]

    def _process(self, code: str) -> float:
        return statistics.median(_seconds([sys.executable, "-c", code]) for _ in range(self.repeats))

    def _help(self, words: list[str]) -> float:
        return statistics.median(_seconds([sys.executable, "-m", "mmsdk.apps.cli", *words, "--help"]) for _ in range(self.repeats))

    def _answers(self) -> list[dict[str, Cell]]:
        started = time.perf_counter()
        pipe = pipeline("image-text-to-text", model=self.model)
        loaded = time.perf_counter() - started
        dtype = str(pipe.vlm.decoder.embedding.weight.dtype).removeprefix("torch.")
        seconds, tokens = _asked(pipe, QUESTIONS[0])
        rows = [_row(f"load {self.model}", loaded, dtype), _row(f"first answer: {QUESTIONS[0]}", seconds, dtype, tokens)]
        for question in QUESTIONS:
            answers = [_asked(pipe, question) for _ in range(self.repeats)]
            rows.append(_row(f"warm answer: {question}", statistics.median(took for took, _ in answers), dtype, answers[0][1]))
        return rows


def _asked(pipe: Pipeline, question: str) -> tuple[float, int]:
    """Seconds and tokens of one answer about the scene, the reading of its file included."""
    started = time.perf_counter()
    answer = pipe(SHIPPED / "scene.png", question, max_tokens=LONGEST)
    return time.perf_counter() - started, answer.tokens.generated


def _row(what: str, seconds: float, dtype: str | None = None, tokens: int | None = None) -> dict[str, Cell]:
    return {"what": what, "seconds": seconds, "dtype": dtype, "tokens": tokens}


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started
