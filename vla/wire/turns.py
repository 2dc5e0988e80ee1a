"""A policy is asked one at a time, whoever asks: calls wait their turn, in the order in which they came."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Generic, TypeVar

from mmsdk.vla.unwaited import POLICY_THREAD

__all__ = ["Turns"]

T = TypeVar("T")


class Turns:
    """Runs calls in one thread of its own, which is a daemon: the end of the program does not wait for a policy that hangs."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=POLICY_THREAD, daemon=True)
        self._thread.start()

    def __call__(self, turn: Callable[[], T]) -> Future[T]:
        """Wait for a turn. What the call returns or raises is the future's; cancelled before its turn, it never runs."""
        future: Future[T] = Future()
        self._waiting.put(partial(_taken, turn, future))
        return future

    def close(self, seconds: float = 1.0) -> bool:
        """End the thread after the calls that wait, for which there are so many seconds; whether it has ended.

        A thread that lets go of a tensor while the interpreter comes to its end aborts the process, so an idle one is waited for.
        """
        self._waiting.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            waiting()
            # what it gave is not kept until the next call
            del waiting


def _taken(turn: Callable[[], T], future: Future[T]) -> None:
    if future.set_running_or_notify_cancel():
        with _RaisedInto(future):
            future.set_result(turn())


@dataclass(frozen=True, slots=True)
class _RaisedInto(Generic[T]):
    """What is raised inside becomes the future's exception, as in the executors of `concurrent.futures`, whose threads are no daemons."""

    future: Future[T]

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is not None:
            self.future.set_exception(error)
        return True
