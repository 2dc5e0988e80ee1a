"""One at a time: whoever changes something that several threads hold keeps the others waiting until it is done."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from mmsdk.errors import InputError

__all__ = ["Exclusive"]


class Exclusive:
    """Held by one thread at a time. `item` is what it guards, as the error names it; a copy is held by nobody.

        with self._alone():
            ...

    Raises InputError for the thread that holds it already, as a handler of signals may: it would wait for itself.
    """

    def __init__(self, item: str) -> None:
        self._item = item
        self._lock, self._held = RLock(), False

    def __reduce__(self) -> tuple[type["Exclusive"], tuple[str]]:
        return Exclusive, (self._item,)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Wait for it, and hold it."""
        with self._lock:
            if self._held:
                raise InputError("this thread is still changing it; let that end before the next", item=self._item)
            self._held = True
            try:
                yield
            finally:
                self._held = False
