"""One at a time: whoever changes something that several threads hold keeps the others waiting until it is done."""

from contextlib import suppress
from threading import RLock, get_ident

from mmsdk.errors import InputError

__all__ = ["Exclusive"]


class Exclusive:
    """Held by one thread at a time. `item` is what it guards, as the error names it; a copy is held by nobody.

        with self._alone:
            ...

    Raises InputError for the thread that holds it already, as a handler of signals may: it would wait for itself.
    """

    def __init__(self, item: str) -> None:
        self._item = item
        self._lock, self._holder = RLock(), 0

    def __reduce__(self) -> tuple[type["Exclusive"], tuple[str]]:
        return Exclusive, (self._item,)

    def __enter__(self) -> None:
        if self._holder == get_ident():
            raise InputError("this thread is still changing it; let that end before the next", item=self._item)
        # no generator: who is interrupted here lets go now, and not when the traceback is freed
        try:
            self._lock.acquire()
            self._holder = get_ident()
        except BaseException:
            self._holder = 0 if self._holder == get_ident() else self._holder
            # who was interrupted while waiting has nothing to let go of
            with suppress(RuntimeError):
                self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._holder = 0
        self._lock.release()
