"""Decode: a language model's speed, memory and perplexity in bfloat16, int8 and int4, beside transformers and llama.cpp on one file."""

import importlib.util
import math
import pydoc_data.topics
import statistics
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from mmsdk.apps.console import Cell
from mmsdk.apps.engines import Contender, Said, Worker
from mmsdk.apps.speed import measured
from mmsdk.errors import InputError
from mmsdk.vision.values import cause
from mmsdk.weights.bundle import pull
from mmsdk.weights.gguf_file import read_file
from mmsdk.weights.gguf_tokenizer import tokenizer_of

__all__ = ["Decode"]

_WARM = 4


@dataclass(frozen=True, slots=True)
class Decode:
    """Each says the likeliest `tokens` tokens after a prompt of `prompt` tokens, in turn (A B C A B C), for `rounds` rounds.

    A turn begins with a prompt that does not count, so that all of them are as warm as one that works all the time.

    `model` is "mini" (its language model, without mini's update) or a GGUF file, which all of them read. Prompts are pieces of `text`, a
    file, or of the language reference that comes with Python; perplexity is over its first `text_tokens` tokens, `prompt` at a time.
    `only` leaves the other engines out, `threads` 0 is as many as torch takes.
    """

    prompt: int = 512
    tokens: int = 128
    rounds: int = 3
    text_tokens: int = 4096
    model: str = "mini"
    text: str = ""
    only: Literal["all", "mmsdk", "transformers", "llama.cpp"] = "all"
    threads: int = 0

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {engine, weights, prefill_tok_s, decode_tok_s, ratios, peak_mb, memory_mb, perplexity, step_mb, of_stream,
        of_products}, one a contender.

        Speeds are medians over the rounds, ratios (`decode_x_transformers`) medians of the ratios within a round. `peak_mb` is the most
        that the process held, loading included, `memory_mb` what it holds at work. `step_mb` is what our decoder reads of its weights for
        a token, `of_stream` that times the speed, as a share of what this machine reads at most; `of_products` is the share of a prompt's
        operations, attention left out, in what torch's bfloat16 products reach here.
        """
        path = self._path()
        ids = self._ids(path)
        threads = self.threads or torch.get_num_threads()
        longest, contenders = self.prompt + self.tokens, self._contenders(path)
        with ExitStack() as stack:
            workers = [stack.enter_context(closing(Worker(contender, path, threads, longest))) for contender in contenders]
            rounds = self._raced(workers, ids)
            memory = [worker.memory() for worker in workers]
            lost = [self._perplexity(worker, ids) for worker in workers]
        roof = measured(torch.device("cpu"))
        return [
            {
                **asdict(contender),
                **(speeds := self._speeds([said[place] for said in rounds])),
                **_ratios(contenders, rounds, place),
                "peak_mb": memory[place].peak,
                "memory_mb": memory[place].now,
                "perplexity": lost[place],
                "step_mb": memory[place].step,
                "of_stream": _share(memory[place].step, speeds["decode_tok_s"], roof.memory),
                "of_products": _share(memory[place].work, speeds["prefill_tok_s"], roof.products["bfloat16"]),
            }
            for place, contender in enumerate(contenders)
        ]

    def _raced(self, workers: Sequence[Worker], ids: Sequence[int]) -> list[list[Said]]:
        """What each said, by rounds: the same prompt for all in a round, another one in the next."""
        starts = [self.prompt * (turn + 1) % (len(ids) - self.prompt + 1) for turn in range(self.rounds)]
        return [[self._turn(worker, ids, start) for worker in workers] for start in starts]

    def _turn(self, worker: Worker, ids: Sequence[int], start: int) -> Said:
        # Uncounted first: while the others had their turns, what this one had near the cores went away.
        worker.say(ids[: self.prompt], _WARM)
        return worker.say(ids[start : start + self.prompt], self.tokens)

    def _speeds(self, said: Sequence[Said]) -> dict[str, float]:
        return {
            "prefill_tok_s": statistics.median(self.prompt / s.first for s in said),
            "decode_tok_s": statistics.median((self.tokens - 1) / s.rest for s in said),
        }

    def _perplexity(self, worker: Worker, ids: Sequence[int]) -> float:
        pieces = [ids[start : start + self.prompt] for start in range(0, self.text_tokens - self.prompt + 1, self.prompt)]
        return math.exp(sum(worker.read(piece) for piece in pieces) / sum(len(piece) - 1 for piece in pieces))

    def _contenders(self, path: Path) -> list[Contender]:
        found = [Contender("mmsdk", weights) for weights in ("bf16", "int8", "int4")] + [Contender("transformers", "bf16")]
        if importlib.util.find_spec("llama_cpp") is not None:
            found.append(Contender("llama.cpp", _stored(path)))
        elif self.only in ("all", "llama.cpp"):
            warnings.warn("no llama.cpp in this result: llama-cpp-python is not installed", stacklevel=2)
        return [contender for contender in found if self.only in ("all", contender.engine)]

    def _path(self) -> Path:
        for name, least in {"prompt": 2, "tokens": 2, "rounds": 1, "text_tokens": self.prompt, "threads": 0}.items():
            if getattr(self, name) < least:
                raise InputError(f"it is {getattr(self, name)}, it must be at least {least}", item=name)
        path = pull("mini")["language"] if self.model == "mini" else Path(self.model)
        if path.suffix != ".gguf" or not path.is_file():
            raise InputError('there is no such GGUF file; it is "mini" or a path that ends in .gguf', item=self.model)
        return path

    def _ids(self, path: Path) -> list[int]:
        ids = tokenizer_of(read_file(path).metadata).encode(self._text())
        needed = max(self.text_tokens, 2 * self.prompt)
        if len(ids) < needed:
            raise InputError(f"it has {len(ids)} tokens, {needed} are needed; name a longer one or ask for fewer", item=self.text or "text")
        return ids[:needed]

    def _text(self) -> str:
        if not self.text:
            return "\n\n".join(pydoc_data.topics.topics.values())
        try:
            return Path(self.text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"it cannot be read as text: {cause(error)}", item=self.text) from error


def _ratios(contenders: Sequence[Contender], rounds: Sequence[Sequence[Said]], place: int) -> dict[str, Cell]:
    """How many times as fast as transformers and llama.cpp; none where they did not run."""
    ratios: dict[str, Cell] = {}
    for engine in ("transformers", "llama.cpp"):
        other = next((i for i, contender in enumerate(contenders) if contender.engine == engine), None)
        for what in ("prefill", "decode"):
            found = [_ratio(said[place], said[other], what) for said in rounds] if other is not None else []
            ratios[f"{what}_x_{engine}"] = statistics.median(found) if found else None
    return ratios


def _ratio(ours: Said, theirs: Said, what: str) -> float:
    return theirs.first / ours.first if what == "prefill" else theirs.rest / ours.rest


def _share(millions: float | None, tok_s: float, roof: float) -> float | None:
    return None if millions is None else 1e6 * millions * tok_s / roof


def _stored(path: Path) -> str:
    """What most of the file's matrices are stored as, as llama.cpp's users call it."""
    kinds = Counter(str(tensor.kind.name) for tensor in read_file(path).tensors.values() if len(tensor.shape) > 1)
    ((kind, _),) = kinds.most_common(1)
    return kind.lower()
