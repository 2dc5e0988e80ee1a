"""Ctrl-C: while the command line is being imported the process ends at once, while a command works it raises as ever.

While something is trained, the first one waits for the step that is being made.

Imports of compiled packages are no place for a KeyboardInterrupt: it may be swallowed there, or end in a traceback. Nothing has been
opened by then, so nothing is lost by leaving; a command has files and locks to put in order.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from mmsdk.vla.unwaited import POLICY_THREAD

__all__ = ["INTERRUPTED", "Stop", "end", "handling", "interruptible", "leave", "leaving_at_once"]

INTERRUPTED = 130  # 128 and the number of the signal, as shells count


def leaving_at_once() -> None:
    """From now on Ctrl-C says so on stderr and ends the process; it stays without effect where whoever started mmsdk has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within, Ctrl-C raises KeyboardInterrupt, where it would have ended the process at once."""
    if signal.getsignal(signal.SIGINT) is not leave:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, leave)


def leave(number: int, frame: FrameType | None) -> None:
    """End the process now, as a handler of signals."""
    # nobody may be reading any more
    with suppress(OSError):
        if sys.stderr is not None:
            os.write(sys.stderr.fileno(), b"\ninterrupted\n")
    os._exit(INTERRUPTED)


def end(code: int) -> int:
    """The exit code, as the last thing that a program does. Where a policy is still at work in its thread, which nobody waits for, the
    process ends here: the interpreter's own end stops such threads in the midst of compiled code, which aborts the process.
    """
    if any(thread.name == POLICY_THREAD for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                if stream is not None:
                    stream.flush()
        os._exit(code)
    return code


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM are handled so, and afterwards as they were before."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


class Stop:
    """Within, the first Ctrl-C is a wish to stop after this step; after it, and outside, Ctrl-C is what it was."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "Stop":
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, *_: object) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._before)
