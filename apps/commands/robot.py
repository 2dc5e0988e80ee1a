"""`mmsdk robot serve FILE.py:NAME`: a policy for robots behind a websocket, until Ctrl-C.

FILE.py holds a function NAME() that gives a `mmsdk.vla.wire.service.Service`; in place of a file, a module that can be imported will do.
With --json one object is printed when the server is ready, and one with what it has done at the end.
"""

import argparse
import asyncio
import importlib
import importlib.util
import json
import logging
import signal
import sys
from inspect import isfunction
from pathlib import Path
from types import FrameType, ModuleType

from mmsdk.errors import InputError
from mmsdk.vla.wire.server import Counts, PolicyServer
from mmsdk.vla.wire.service import Service

__all__ = ["run"]

USAGE = "write: mmsdk robot serve FILE.py:NAME"


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted: 0 where the server came to its end in order, also by Ctrl-C. A second Ctrl-C does not wait."""
    key = _key(args.api_key_file) if args.api_key_file else ""
    server = PolicyServer(_service(args.policy), args.host, args.port, api_key=key)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    asyncio.run(_serve(server, args.json))
    _tell_end(server.counts, args.json)
    return 0


async def _serve(server: PolicyServer, as_json: bool) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler)
        loop.call_soon_threadsafe(stop.set)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        await server.run(stop, lambda url: _tell_ready(url, server.service, as_json))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell_ready(url: str, service: Service, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"url": url, "robot": service.contract.name, "largest_bytes": service.largest}), flush=True)
    else:
        print(f"a policy for {service.contract.name} is served at {url}; Ctrl-C ends it", flush=True)


def _tell_end(counts: Counts, as_json: bool) -> None:
    told = {"clients": counts.clients, "answered": counts.answered, "late": counts.late, "refused": counts.refused, "failed": counts.failed}
    print(json.dumps(told) if as_json else ", ".join(f"{name} {count}" for name, count in told.items()), flush=True)


def _service(text: str) -> Service:
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise InputError(f"it names no function; {USAGE}", item=text)
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    make = vars(module).get(name)
    if not callable(make):
        functions = [known for known, value in vars(module).items() if isfunction(value) and value.__module__ == module.__name__]
        raise InputError(f"there is no function {name!r} in {place}; there is {', '.join(functions) or 'none'}", item=text)
    service = make()
    if not isinstance(service, Service):
        raise InputError(f"{name}() gave a {type(service).__name__}, expected a Service", item=text)
    return service


def _file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"served_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError("there is no such file", item=str(path))
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by its name
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise InputError(f"there is no module of that name; {USAGE}", item=name)
    return importlib.import_module(name)


def _key(path: str) -> str:
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", item=path) from None
    if not key:
        raise InputError("it is empty", item=path)
    return key
