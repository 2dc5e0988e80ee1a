"""What the tab of made clips computes, without the page: a video model that all visitors share, one clip at a time, step by step."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Lock

from mmsdk.diffusion.clip import Clip
from mmsdk.diffusion.filming import VideoGeneration

__all__ = ["Films", "Order", "Progress"]

STEP = 0.2  # seconds between two looks


@dataclass(frozen=True, slots=True)
class Order:
    """What a visitor wants: the arguments of `VideoGeneration`."""

    text: str
    seed: int = 0
    steps: int = 20
    guidance: float = 3.0
    attention: str = "dense"
    cache: str = "none"
    two_stage: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a clip is: steps done, seconds since it was asked for, and at the end the clip."""

    step: int
    seconds: float
    clip: Clip | None = None


class _StoppedError(Exception):
    """Ends a clip between two steps; nobody sees it."""


class Films:
    """`load` opens the model when it is first needed; `name` is what the page calls it. Clips are made one after another."""

    def __init__(self, load: Callable[[], VideoGeneration], name: str) -> None:
        self.name = name
        self._load = load
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="films")
        self._pipe: VideoGeneration | None = None
        self._lock, self._closed = Lock(), Event()

    def pipe(self) -> VideoGeneration:
        """The model, loaded once. Raises what loading raises."""
        with self._lock:
            if self._pipe is None:
                self._pipe = self._load()
            return self._pipe

    def make(self, order: Order, stopped: Callable[[], bool]) -> Iterator[Progress]:
        """The clip, told step by step; it ends early, without one, once `stopped` says so. Raises as the pipeline does."""
        told, over, begun = SimpleQueue[int](), Event(), time.perf_counter()
        future = self._pool.submit(self._made, order, told, over)
        step = 0
        try:
            while not future.done():
                if stopped():
                    return
                with suppress(Empty):
                    step = told.get(timeout=STEP)
                yield Progress(step, time.perf_counter() - begun)
            if not self._closed.is_set():
                yield Progress(order.steps, time.perf_counter() - begun, future.result())
        finally:
            # whoever has left, or has enough, leaves the processor to the next one
            over.set()
            _dropped(future)

    def close(self) -> None:
        """Begin no further clip, and end the one that is being made after its step: a program that ends waits for it."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _made(self, order: Order, told: "SimpleQueue[int]", over: Event) -> Clip:
        def advance(step: int) -> None:
            if over.is_set() or self._closed.is_set():
                raise _StoppedError
            told.put(step)

        return self.pipe()(
            order.text, seed=order.seed, steps=order.steps, guidance=order.guidance, attention=order.attention, cache=order.cache,
            two_stage=order.two_stage, advance=advance,
        )  # fmt: skip


def _dropped(future: "Future[Clip]") -> None:
    if not future.cancel():
        # what it raises once it is over has been seen, or is of no interest
        future.add_done_callback(lambda done: done.exception())
