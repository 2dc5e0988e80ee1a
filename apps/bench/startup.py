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
        """Rows {what, seconds}."""
        return [
            {"what": "import mmsdk", "seconds": self._process("import mmsdk") - self._process("pass")},
            {"what": "mmsdk --help", "seconds": self._help([])},
            {"what": "mmsdk ask --help", "seconds": self._help(["ask"])},
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
        picture = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
        times = []
        for _ in range(self.repeats + 1):
            started = time.perf_counter()
            pipe(picture, "What is in the picture?", max_tokens=8)
            times.append(time.perf_counter() - started)
        return [
            {"what": f"load {self.model}", "seconds": loaded},
            {"what": "first answer, 224 px image, at most 8 tokens", "seconds": times[0]},
            {"what": "warm answer, 224 px image, at most 8 tokens", "seconds": statistics.median(times[1:])},
        ]


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started
