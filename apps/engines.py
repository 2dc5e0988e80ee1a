"""What runs a language model's GGUF file: mmsdk, transformers, llama.cpp, each in a process of its own, told what to do through a pipe.

Memory is then each one's own, none warms another's caches, and one that waits takes no time from one that works.
"""

import importlib
import multiprocessing
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.errors import MmsdkError, ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.loop import generate
from mmsdk.kv.dense import DenseCache
from mmsdk.models.text import load_decoder
from mmsdk.quant.types import Quantize

__all__ = ["Contender", "Engine", "Memory", "Read", "Said", "Say", "Worker", "open_engine"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16, "int4": torch.bfloat16}
_SCHEMES: dict[str, Quantize] = {"int8": "int8", "int4": "int4"}
# Scores of a whole vocabulary are large: so many tokens at a time.
_SCORED = 64


@dataclass(frozen=True, slots=True)
class Contender:
    """Who runs the model, and how the weights are stored: "fp32", "bf16", "int8" or "int4", for llama.cpp as they are in the file."""

    engine: str
    weights: str


@dataclass(frozen=True, slots=True)
class Say:
    """Asks for the likeliest `tokens` tokens after a prompt, whatever they are."""

    prompt: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Read:
    """Asks for the sum of -log p of each of these tokens but the first, given those before it."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Said:
    """The tokens, the seconds until the first of them was known, and the seconds that all others took."""

    ids: tuple[int, ...]
    first: float
    rest: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a process, in millions of bytes: the most it ever held, and what it holds now; none where the system does not tell.

    `step` is what one token reads of the weights, and `work` the millions of operations that the products of the layers take for each token
    of a long prompt, where the engine is ours.
    """

    peak: float | None
    now: float | None
    step: float | None
    work: float | None


@runtime_checkable
class Engine(Protocol):
    """One of the three."""

    def say(self, asked: Say) -> Said: ...

    def read(self, asked: Read) -> float: ...

    def step(self) -> float | None:
        """Millions of bytes of weights that one token reads, where that is known."""
        ...

    def work(self) -> float | None:
        """Millions of operations in the products of the layers for a token of a prompt (a multiplication and an addition are two).

        Of any but the last one the last layer only makes keys and values.
        """
        ...


class Worker:
    """An engine in a process of its own. `ask` waits for the answer; an error that the engine raises on purpose is raised here."""

    def __init__(self, contender: Contender, path: Path, threads: int, longest: int) -> None:
        fresh = multiprocessing.get_context("spawn")
        self.contender = contender
        self._pipe, theirs = fresh.Pipe()
        self._process = fresh.Process(target=_work, args=(theirs, contender, path, threads, longest), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def say(self, prompt: Sequence[int], tokens: int) -> Said:
        """See `Say`."""
        said = self._ask(Say(tuple(prompt), tokens))
        assert isinstance(said, Said), "a worker answers what it was asked"
        return said

    def read(self, ids: Sequence[int]) -> float:
        """See `Read`."""
        lost = self._ask(Read(tuple(ids)))
        assert isinstance(lost, float), "a worker answers what it was asked"
        return lost

    def memory(self) -> Memory:
        """See `Memory`."""
        found = self._ask(None)
        assert isinstance(found, Memory), "a worker answers what it was asked"
        return found

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()

    def _ask(self, asked: object) -> object:
        self._pipe.send(asked)
        return self._answer()

    def _answer(self) -> object:
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise ModelError(
                f"{self.contender.engine} ({self.contender.weights}) ended before it answered; what it said is above"
            ) from None
        if isinstance(answer, MmsdkError):
            raise answer
        return answer


def _work(pipe: Connection, contender: Contender, path: Path, threads: int, longest: int) -> None:
    # Ctrl-C is the parent's to handle; this process ends when its pipe does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    try:
        engine = open_engine(contender, path, threads, longest)
        pipe.send("ready")
        while True:
            asked = pipe.recv()
            pipe.send(engine.say(asked) if isinstance(asked, Say) else engine.read(asked) if isinstance(asked, Read) else _memory(engine))
    except MmsdkError as error:
        pipe.send(error)
    except EOFError:
        return


def open_engine(contender: Contender, path: Path, threads: int, longest: int) -> Engine:
    """The engine on a GGUF file, for prompts and answers of up to `longest` tokens together.

    Raises ModelError for one that is not known or not installed, and as `load_decoder` does.
    """
    if contender.engine == "mmsdk":
        return _Ours(path, contender.weights)
    if contender.engine == "transformers":
        return _Transformers(path, contender.weights)
    if contender.engine == "llama.cpp":
        return _LlamaCpp(path, threads, longest)
    raise ModelError(f"there is no engine {contender.engine!r}; there are mmsdk, transformers, llama.cpp")


class _Ours:
    def __init__(self, path: Path, weights: str) -> None:
        self.dtype = _DTYPES[weights]
        self.decoder, self.tokenizer = load_decoder(path, self.dtype, _SCHEMES.get(weights, "none"))

    def say(self, asked: Say) -> Said:
        started = time.perf_counter()
        with torch.no_grad():
            hidden, cache = self._run(asked.prompt, asked.tokens, last=1)
        config = GenerationConfig(max_tokens=asked.tokens)
        ids: list[int] = []
        stamps = []
        for step in generate(self.decoder, hidden[:, -1], cache, [config], self.tokenizer.decode, frozenset()):
            if isinstance(step.finish, ModelError):
                raise step.finish
            ids.extend(step.ids)
            stamps.append(time.perf_counter())
        return Said(tuple(ids), stamps[0] - started, stamps[-1] - stamps[0])

    @torch.no_grad()
    def read(self, asked: Read) -> float:
        hidden, _ = self._run(asked.ids, 0, last=0)
        targets = torch.tensor(asked.ids[1:])
        parts = zip(hidden[0, :-1].split(_SCORED), targets.split(_SCORED), strict=True)
        return sum(_lost(self.decoder.logits(part), wanted) for part, wanted in parts)

    def step(self) -> float:
        weights = sum(tensor.nbytes for tensor in (*self.decoder.parameters(), *self.decoder.buffers()))
        config = self.decoder.config
        # of an embedding that no head shares, a single row is read
        spare = 0 if config.tied else config.vocabulary * config.width * self.dtype.itemsize
        return (weights - spare) / 1e6

    def work(self) -> float:
        config = self.decoder.config
        behind = config.heads * config.head_dim + 3 * config.inner
        asking = (config.heads + 2 * config.kv_heads) * config.head_dim
        return 2 * config.width * (config.layers * asking + (config.layers - 1) * behind) / 1e6

    def _run(self, ids: Sequence[int], room: int, last: int) -> tuple[Tensor, DenseCache]:
        config = self.decoder.config
        sizes = config.layers, 1, config.kv_heads, config.entry, len(ids) + room
        cache = DenseCache.allocate(*sizes, self.dtype, "cpu")
        return self.decoder(self.decoder.embed(torch.tensor([ids])), torch.arange(len(ids))[None], cache, last=last), cache


class _Transformers:
    def __init__(self, path: Path, weights: str) -> None:
        # Imported by the process that runs it: in the others it would count as memory of theirs.
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=_DTYPES[weights]).eval()
        # nobody stops at the end of text, so that all say as many tokens
        self.model.generation_config.eos_token_id = None

    def say(self, asked: Say) -> Said:
        ids, stamps = torch.tensor([asked.prompt]), _Stamps()
        started = time.perf_counter()
        whole = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked.tokens, do_sample=False, streamer=stamps)
        first, last = stamps.times[1], stamps.times[-1]
        return Said(tuple(whole[0, len(asked.prompt) :].tolist()), first - started, last - first)

    @torch.no_grad()
    def read(self, asked: Read) -> float:
        scores = self.model(torch.tensor([asked.ids])).logits[0, :-1]
        parts = zip(scores.split(_SCORED), torch.tensor(asked.ids[1:]).split(_SCORED), strict=True)
        return sum(_lost(part.float(), wanted) for part, wanted in parts)

    def step(self) -> None:
        return None

    def work(self) -> None:
        return None


class _Stamps:
    """When transformers gave what: the prompt first, then every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


class _LlamaCpp:
    """llama.cpp by way of llama-cpp-python, which may not be installed."""

    def __init__(self, path: Path, threads: int, longest: int) -> None:
        try:
            self._module = importlib.import_module("llama_cpp")
        except ImportError as error:
            raise ModelError(f"llama.cpp is not here: {error}; install llama-cpp-python") from error
        self._settings = {"model_path": str(path), "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        self._model = self._module.Llama(**self._settings, n_ctx=longest)

    def say(self, asked: Say) -> Said:
        self._model.reset()
        started = time.perf_counter()
        ids, stamps = [], []
        for token in self._model.generate(list(asked.prompt), temp=0.0, repeat_penalty=1.0):
            ids.append(int(token))
            stamps.append(time.perf_counter())
            if len(ids) == asked.tokens:
                break
        return Said(tuple(ids), stamps[0] - started, stamps[-1] - stamps[0])

    def read(self, asked: Read) -> float:
        # keeping the scores of every token takes memory and time, so that another instance does it, after what was measured
        model = self._module.Llama(**self._settings, n_ctx=len(asked.ids), logits_all=True)
        model.eval(list(asked.ids))
        scores = torch.from_numpy(np.array(model.scores[: len(asked.ids) - 1]))
        return _lost(scores, torch.tensor(asked.ids[1:]))

    def step(self) -> None:
        return None

    def work(self) -> None:
        return None


def _lost(scores: Tensor, wanted: Tensor) -> float:
    return float(F.cross_entropy(scores, wanted, reduction="sum"))


def _memory(engine: Engine) -> Memory:
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.is_file() else []
    kilobytes = {name: float(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if name in ("VmHWM", "VmRSS")}
    peak, now = (kilobytes[name] * 1024 / 1e6 if name in kilobytes else None for name in ("VmHWM", "VmRSS"))
    return Memory(peak, now, engine.step(), engine.work())
