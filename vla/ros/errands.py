"""What other threads want the loop's thread to do, one after the other: transitions of a lifecycle, the release of an emergency stop."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Lock

from mmsdk.errors import InputError, MmsdkError, ModelError

__all__ = ["Errands"]

Job = Callable[[], object]


class Errands:
    """`ask` is for other threads, `serve` and `close` for the loop's."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Job, Future[object]]] = SimpleQueue()
        self._closed = False
        self._lock = Lock()

    def ask(self, job: Job) -> str:
        """Wait until the job is done; why it could not be, "" where it could."""
        future: Future[object] = Future()
        with self._lock:
            if self._closed:
                return "the node has been stopped"
            self._waiting.put((job, future))
        return str(future.exception() or "")

    def serve(self, patience: float = 0.0) -> None:
        """Do what has been waiting longest, or comes within `patience` seconds.

        An error of ours is told to who asked; what else goes wrong is raised, and ends the node.
        """
        try:
            job, future = self._waiting.get(timeout=patience) if patience > 0 else self._waiting.get_nowait()
        except Empty:
            return
        with _told(future):
            future.set_result(job())

    def close(self) -> None:
        """Nothing more is done: who waits is told, and who asks from now on."""
        with self._lock:
            self._closed = True
        while not self._waiting.empty():
            self._waiting.get()[1].set_exception(InputError("the node has been stopped"))


@contextmanager
def _told(future: "Future[object]") -> Iterator[None]:
    try:
        yield
    except MmsdkError as error:
        future.set_exception(error)
    finally:
        # nobody waits for ever
        if not future.done():
            future.set_exception(ModelError("the node broke"))
