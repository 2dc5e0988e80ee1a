"""`mmsdk robot serve FILE.py:NAME`: a policy for robots behind a websocket, until Ctrl-C.

FILE.py holds a function NAME() that gives a `mmsdk.vla.wire.service.Service`; in place of a file, a module that can be imported will do.
With --json one object is printed when the server is ready, and one with what it has done at the end.
"""

import argparse
import asyncio
import json
import logging
import signal
from types import FrameType

from mmsdk.apps.beforehand import text_in
from mmsdk.apps.interrupts import handling, leave
from mmsdk.apps.loading import made
from mmsdk.errors import InputError
from mmsdk.vla.wire.server import Counts, PolicyServer
from mmsdk.vla.wire.service import Service

__all__ = ["run"]

USAGE = "write: mmsdk robot serve FILE.py:NAME"


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted: 0 where the server came to its end in order, also by Ctrl-C. A second Ctrl-C does not wait: 130."""
    if len(args.words) != 1:
        raise InputError(f"expected one service; {USAGE}", item=" ".join(args.words))
    key = _key(args.api_key_file) if args.api_key_file else ""
    server = PolicyServer(made(args.words[0], Service, USAGE), args.host, args.port, api_key=key)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    asyncio.run(_serve(server, args.json))
    _tell_end(server.counts, args.json)
    return 0


async def _serve(server: PolicyServer, as_json: bool) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def interrupt(number: int, frame: FrameType | None) -> None:
        # nothing moves here, so that nothing has to come to rest
        signal.signal(number, leave)
        loop.call_soon_threadsafe(stop.set)

    with handling(interrupt):
        await server.run(stop, lambda url: _tell_ready(url, server.service, as_json))


def _tell_ready(url: str, service: Service, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"url": url, "robot": service.contract.name, "largest_bytes": service.largest}), flush=True)
    else:
        print(f"a policy for {service.contract.name} is served at {url}; Ctrl-C ends it", flush=True)


def _tell_end(counts: Counts, as_json: bool) -> None:
    told = {"clients": counts.clients, "answered": counts.answered, "late": counts.late, "refused": counts.refused, "failed": counts.failed}
    print(json.dumps(told) if as_json else ", ".join(f"{name} {count}" for name, count in told.items()), flush=True)


def _key(path: str) -> str:
    key = text_in(path).strip()
    if not key:
        raise InputError("it is empty", item=path)
    return key
