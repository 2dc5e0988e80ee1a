"""Engine: many questions together beside one after another, on mini: tokens a second, time to the first, blocks in use and left behind."""

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from mmsdk.answer import Answer
from mmsdk.apps.console import Cell
from mmsdk.errors import InputError
from mmsdk.generate.config import GenerationConfig
from mmsdk.models.mini.family import load
from mmsdk.pipeline import Pipeline
from mmsdk.precision import resolve_dtype, resolve_quantize
from mmsdk.serve.engine import Engine

__all__ = ["Serving"]


@dataclass(frozen=True, slots=True)
class Load:
    """Questions with what they are about, and how many tokens each answer has."""

    name: str
    asked: tuple[tuple[tuple[np.ndarray, ...], str], ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Serving:
    """`requests` questions, each about a picture of noise of its own, with answers of `tokens` tokens, and half as many without a picture,
    with answers of `talk` tokens (0 leaves these out)."""

    requests: int = 16
    tokens: int = 64
    talk: int = 256
    dtype: str = "auto"
    quantize: str = "none"

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {load, concurrency, throughput_tok_s, speedup, same, utilisation, leaked_blocks, p95_ttft_ms}.

        Of the load "pictures" about half of the time goes into prompts, which are bound by their products and gain little from company; of
        "talk" nearly all goes into tokens that are said. Concurrency 0 is the pipeline, one question after another, which the speedup is
        over; all requests are there from the start, and `same` is how many are answered in the same words. Utilisation is the mean over
        the steps, of the blocks of those who speak.
        """
        if self.requests < 1:
            raise InputError(f"it is {self.requests}, it must be at least 1", item="requests")
        device = torch.device("cpu")
        mini = load("mini", None, resolve_dtype(self.dtype, device), device, resolve_quantize(self.quantize, device))
        # mini has little to say of noise: nobody stops at the end of text, so that all answers are as long
        pipe = Pipeline(replace(mini, stop_ids=frozenset()))
        draw = np.random.default_rng(0)
        pictures = [draw.integers(0, 256, (224, 224, 3), dtype=np.uint8) for _ in range(self.requests)]
        loads = [Load("pictures", tuple(((picture,), _question(number)) for number, picture in enumerate(pictures)), self.tokens)]
        if self.talk:
            loads.append(Load("talk", tuple(((), _talk(number)) for number in range(max(1, self.requests // 2))), self.talk))
        pipe(pictures[0], _question(0), max_tokens=2)
        return [row for one in loads for row in self._measured(pipe, one)]

    def _measured(self, pipe: Pipeline, asked: Load) -> list[dict[str, Cell]]:
        first, answers = self._alone(pipe, asked)
        return [first, *(self._together(pipe, asked, rows, first, answers) for rows in (1, 2, 4, 8))]

    def _alone(self, pipe: Pipeline, asked: Load) -> tuple[dict[str, Cell], list[Answer]]:
        started, firsts, answers = time.perf_counter(), list[float](), list[Answer]()
        for media, question in asked.asked:
            stream = pipe.stream(list(media), question, max_tokens=asked.tokens)
            next(stream, None)
            firsts.append(time.perf_counter() - started)
            answers.append(stream.answer)
        seconds = time.perf_counter() - started
        speed = sum(answer.tokens.generated for answer in answers) / seconds
        return _row(asked, 0, speed, 1.0, len(answers), None, 0, firsts), answers

    def _together(self, pipe: Pipeline, asked: Load, rows: int, alone: dict[str, Cell], answers: list[Answer]) -> dict[str, Cell]:
        engine, config = Engine(pipe, rows=rows), GenerationConfig(max_tokens=asked.tokens)
        started, firsts, used = time.perf_counter(), dict[int, float](), list[float]()
        numbers = [engine.submit(list(media), question, config) for media, question in asked.asked]
        texts, said = dict.fromkeys(numbers, ""), 0
        while engine.busy:
            for event in engine.step():
                firsts.setdefault(event.number, time.perf_counter() - started)
                texts[event.number] += event.text
                said += len(event.ids)
            used.append(engine.utilisation)
        speed, same = said / (time.perf_counter() - started), sum(map(str.__eq__, texts.values(), map(str, answers)))
        base = alone["throughput_tok_s"]
        assert isinstance(base, float)
        return _row(asked, rows, speed, speed / base, same, sum(used) / len(used), engine.held, list(firsts.values()))


def _question(number: int) -> str:
    return f"Question {number}: describe what can be seen in this picture, and which colours it has."


def _talk(number: int) -> str:
    return f"Tell a story about the ship number {number}, its captain, and where it went."


def _row(
    asked: Load, concurrency: int, speed: float, speedup: float, same: int, used: float | None, leaked: int, firsts: list[float]
) -> dict[str, Cell]:
    return {
        "load": asked.name,
        "concurrency": concurrency,
        "throughput_tok_s": speed,
        "speedup": speedup,
        "same": same,
        "utilisation": used,
        "leaked_blocks": leaked,
        "p95_ttft_ms": 1000 * float(np.percentile(firsts, 95)),
    }
