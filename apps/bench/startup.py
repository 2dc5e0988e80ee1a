"""Startup: how long a person waits before anything happens: imports, help, loading the default model, the first and a later answer."""

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np

from mmsdk.apps.console import Cell
from mmsdk.pipeline import pipeline

__all__ = ["Startup"]


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
        picture = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
        times = []
        for _ in range(self.repeats + 1):
            started = time.perf_counter()
            answer = pipe(picture, "What is in the picture?", max_tokens=8)
            times.append(time.perf_counter() - started)
        return [
            _row(f"load {self.model}", loaded, dtype),
            _row("first answer, 224 px image, at most 8 tokens", times[0], dtype, answer.tokens.generated),
            _row("warm answer, 224 px image, at most 8 tokens", statistics.median(times[1:]), dtype, answer.tokens.generated),
        ]


def _row(what: str, seconds: float, dtype: str | None = None, tokens: int | None = None) -> dict[str, Cell]:
    return {"what": what, "seconds": seconds, "dtype": dtype, "tokens": tokens}


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started
