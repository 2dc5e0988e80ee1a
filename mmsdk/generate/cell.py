"""The program of the processes in which `mmsdk.generate.sealed` has JSON schemas compiled and followed. Run, never imported.

It is told the vocabulary once, over the socket whose number it is started with. From then on it forks a copy of itself for every form, and
hands it the socket that comes for that form. A copy obeys one order at a time: each may take so many seconds of the processor's time, and
all of them so many bytes beyond what the copy began with. What goes over ends the copy where it stands. A copy cannot tell its own end, so
the first process, which waits for it, does: a reply begins with "=", and the word of an end with "-", behind which stands `TIME`, `MEMORY`,
or nothing, where the form is not at fault. Nothing of mmsdk's is imported here: a copy is a few megabytes.
"""

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from socket import recv_fds, socket, socketpair
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

TIME, MEMORY = b"time", b"memory"
_FULL = 3
# Where no more memory is had, Rust aborts, a stack that cannot grow is a segmentation fault, and Python raises MemoryError.
_ENDS = {-signal.SIGPROF: TIME, -signal.SIGABRT: MEMORY, -signal.SIGSEGV: MEMORY, _FULL: MEMORY}


def main() -> None:
    """Fork for every form that comes, until the socket ends."""
    door = socket(fileno=int(sys.argv[1]))
    first = Connection(os.dup(door.fileno()))
    told = json.loads(first.recv_bytes())
    try:
        # a form is found wrong without a vocabulary, too
        words = LLTokenizer(told["tokenizer"], n_vocab=told["v"], eos_token=told["ends"]) if told["v"] else None
    except ValueError as error:
        first.send_bytes(json.dumps(str(error)).encode())
        return
    first.send_bytes(b'""')
    first.close()
    woken, waker = socketpair()
    woken.setblocking(False)
    waker.setblocking(False)
    # the end of a copy wakes the loop
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    held = dict[int, Connection]()
    while True:
        ready = wait([door, woken])
        if woken in ready:
            woken.recv(4096)
            _tell_ends(held)
        if door not in ready:
            continue
        found = recv_fds(door, 1, 1)[1]
        if not found:
            return
        try:
            copy = os.fork()
        except OSError:
            # whoever asked sees the end of the socket
            os.close(found[0])
            continue
        if not copy:
            signal.set_wakeup_fd(-1)
            door.close()
            woken.close()
            waker.close()
            # or an end of theirs would not be seen
            for other in held.values():
                other.close()
            _obey(Connection(found[0]), words, LLParserLimits(**told["limits"]), told["room"])
            os._exit(0)
        held[copy] = Connection(found[0])


def _tell_ends(held: dict[int, Connection]) -> None:
    """Tell whoever asked why its copy ended, of all that have."""
    while held:
        copy, status = os.waitpid(-1, os.WNOHANG)
        if not copy:
            return
        with held.pop(copy) as asked, suppress(OSError):
            asked.send_bytes(b"-" + _ENDS.get(os.waitstatus_to_exitcode(status), b""))


def _obey(asked: Connection, words: LLTokenizer | None, limits: LLParserLimits, room: int) -> None:
    _keep_within(room)
    led = dict[int, LLMatcher]()
    while True:
        try:
            order = json.loads(asked.recv_bytes())
            # of the processor's time, so that a machine with much to do makes no form too costly; its signal ends the process
            signal.setitimer(signal.ITIMER_PROF, order["seconds"])
            for number in order["over"]:
                led.pop(number, None)
            reply = _done(led, words, limits, *order["order"])
            signal.setitimer(signal.ITIMER_PROF, 0)
            asked.send_bytes(b"=" + reply)
        except MemoryError:
            os._exit(_FULL)
        except (EOFError, OSError):
            return


def _done(led: dict[int, LLMatcher], words: LLTokenizer | None, limits: LLParserLimits, name: str, number: int, *given: Any) -> bytes:
    """The answer to one order; `number` is of the guide that it is for."""
    if name == "check":
        return json.dumps(LLMatcher.validate_grammar(given[0], limits=limits)).encode()
    if name == "compile":
        assert words is not None, "no order to compile comes before the vocabulary"
        bare = LLMatcher(words, given[0], log_level=0, limits=limits)
        bare.compute_bitmask()
        if not bare.is_error():
            led[number] = LLMatcher(words, given[1], log_level=0, limits=limits)
        return json.dumps((bare.get_error() or "NoExtension") if bare.is_error() else "").encode()
    if name == "mask":
        return led[number].compute_bitmask()
    if name == "copy":
        led[given[0]] = led[number].deep_copy()
    elif name == "push":
        led[number].consume_token(given[0])
    place = led[given[0] if name == "copy" else number]
    return json.dumps([place.is_stopped(), place.get_error() if place.is_error() else ""]).encode()


def _keep_within(room: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/statm") as file:
            begun = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        # where the system does not tell, time alone bounds it
        return
    resource.setrlimit(resource.RLIMIT_AS, (begun + room, begun + room))


if __name__ == "__main__":
    main()
