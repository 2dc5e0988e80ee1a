"""The program of the processes in which `mmsdk.generate.sealed` has JSON schemas compiled and followed. Run, never imported.

It is told the vocabulary once, over the socket whose number it is started with. From then on it forks a copy of itself for every form, and
hands it the socket that comes for that form. A copy obeys one order at a time: each may take so many seconds of the processor's time, and
all of them so many bytes beyond what the copy began with. What goes over ends the copy where it stands, which whoever asked sees as the
end of the socket. Nothing of mmsdk's is imported here: a copy is a few megabytes.
"""

import json
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from socket import recv_fds, socket
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer


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
    # nobody waits for the copies
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while found := recv_fds(door, 1, 1)[1]:
        if not os.fork():
            door.close()
            _obey(Connection(found[0]), words, LLParserLimits(**told["limits"]), told["room"])
            os._exit(0)
        os.close(found[0])


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
            asked.send_bytes(reply)
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
