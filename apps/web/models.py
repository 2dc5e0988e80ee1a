"""The model behind the page, once for each way its matrices are stored: loaded when first asked for, then shared by everybody.

Several visitors are answered at one time, token by token in turns: `turn` is held for one piece of work and never while somebody only
reads, so that the milliseconds of an answer are its own, whoever else asks.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock

import torch

from mmsdk.compress import CompressionSpec, compression
from mmsdk.errors import ModelError
from mmsdk.models.types import VLM
from mmsdk.pipeline import Pipeline
from mmsdk.recall import Recall

__all__ = ["WEIGHTS", "Models", "weight_megabytes"]

WEIGHTS = ("none", "int8", "int4")
"""How the language model's matrices may be stored; "none" is the number format it computes in."""
STEP = 0.2  # seconds between two looks at a model that loads


class Models:
    """`load` opens the model by the name of how its matrices are stored; `name` and `precision` are what the page calls it.

    `first` and `kv` are the weights and the memory that a page begins with.
    """

    def __init__(self, load: Callable[[str], VLM], name: str, precision: str, first: str = "none", kv: str = "dense") -> None:
        self.name, self.precision, self.first, self.kv = name, precision, first, kv
        self.turn = Lock()
        self._load = load
        self._futures: dict[str, Future[VLM]] = {}
        self._lock, self._closed = Lock(), False
        # one after the other: each takes a whole processor, and the memory of a model in float32
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="model")

    def begin(self, weights: str) -> "Future[VLM]":
        """The model, which is loaded in the background if nobody asked for it before, or if that failed.

        Raises ModelError for weights that there are not, and for any that would have to be loaded while the page closes.
        """
        if weights not in WEIGHTS:
            raise ModelError(f"there are no weights {weights!r}; choose {', '.join(WEIGHTS)}")
        with self._lock:
            known = self._futures.get(weights)
            if known is None or known.cancelled() or (known.done() and known.exception() is not None):
                if self._closed:
                    raise ModelError("the page is closing; no model is loaded any more")
                self._futures[weights] = known = self._pool.submit(self._opened, weights)
            return known

    def ready(self, weights: str) -> bool:
        """Whether it is there."""
        known = self._futures.get(weights)
        return known is not None and known.done() and not known.cancelled() and known.exception() is None

    def waited(self, weights: str) -> Iterator[float]:
        """The seconds that have been waited, again and again until the model is there, or cannot be had."""
        begun, future = time.perf_counter(), self.begin(weights)
        while not future.done():
            yield time.perf_counter() - begun
            wait((future,), STEP)
        if future.cancelled():
            raise ModelError("the page is closing; no model is loaded any more")

    def pipe(self, weights: str, compress: CompressionSpec = "identity", recall: Recall = Recall()) -> Pipeline:
        """A pipeline over the shared model. Waits until it is there; raises what loading raised, and as `compression` does."""
        return Pipeline(self.begin(weights).result(), compression(compress), recall=recall)

    def label(self, weights: str) -> str:
        """What the page calls a way of storing."""
        return self.precision if weights == "none" else weights

    def close(self) -> None:
        """Begin with no further model."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _opened(self, weights: str) -> VLM:
        vlm = self._load(weights)
        # the first pass sets up threads and kernels, which is no part of anybody's answer
        with self.turn:
            Pipeline(vlm)(torch.zeros(3, 56, 56, dtype=torch.uint8), "What is it?", max_tokens=1)
        return vlm


def weight_megabytes(vlm: VLM) -> float:
    """What the language model's weights take in memory, in MB."""
    parts = (*vlm.decoder.parameters(), *vlm.decoder.buffers())
    return sum(part.nbytes for part in {part.data_ptr(): part for part in parts}.values()) / 1e6
