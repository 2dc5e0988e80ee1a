"""`mmsdk serve`: load a model and serve it until Ctrl-C or SIGTERM.

With --json one object is printed when the server is ready. A second signal does not wait for what runs, a third for nothing at all.
"""

import argparse
import asyncio
import json
import logging
import socket
import sys
import warnings
from types import FrameType

from mmsdk.apps.adapters import adapted
from mmsdk.apps.beforehand import keys_in, listening
from mmsdk.apps.console import busy
from mmsdk.apps.interrupts import handling, leave
from mmsdk.apps.serve.server import serve
from mmsdk.apps.serve.service import Service
from mmsdk.apps.serve.settings import Settings
from mmsdk.legibility import LegibilityWarning
from mmsdk.pipeline import pipeline

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted: 0 where the server came to its end in order. Wrong flags are told before a model is loaded.

    Raises KeyboardInterrupt where a second signal cut off what ran.
    """
    settings = Settings(
        rows=args.rows,
        waiting=args.waiting,
        body=args.max_body_mb * 2**20,
        media=args.max_media,
        pixels=args.max_pixels,
        frames=args.frames,
        tokens=args.max_tokens,
        seconds=args.timeout,
        arrival=args.body_timeout,
        forming=args.form_timeout,
        grace=args.grace,
        pool=args.pool,
        hosts=tuple(args.allow_host),
        networks=tuple(args.allow_network),
        keys=keys_in(args.api_key_file) if args.api_key_file else (),
        origins=tuple(args.allow_origin),
    )
    with listening(args.host, args.port) as door:
        with busy(f"loading {args.model}"):
            steps = args.compress or "identity"
            pipe = pipeline(
                model=args.model, compress=steps, dtype=args.dtype, device=args.device, quantize=args.quantize,
                kv=args.kv, gguf_file=args.gguf_file, progress=not args.json,
            )  # fmt: skip
            adapted(pipe, args.adapter)
        service = Service(pipe, settings, args.name or "")
        # uvicorn tells of what breaks, and of strangers that speak no HTTP
        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
        # it is said once a picture, and nobody of those who ask reads it here
        warnings.simplefilter("ignore", LegibilityWarning)
        if asyncio.run(_until_signalled(service, door, args.json)) > 1:
            raise KeyboardInterrupt
    return 0


async def _until_signalled(service: Service, door: socket.socket, as_json: bool) -> int:
    """Serve until the first signal and what ran then is answered, or cut off by a second one; how many signals came."""
    stop, hurry, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
    came = 0

    def end() -> None:
        stop.set()
        _tell_end(service)

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came += 1
        if came > 2:
            leave(number, frame)
        loop.call_soon_threadsafe(end if came == 1 else hurry.set)

    with handling(interrupt):
        await serve(service, door, stop, lambda url: _tell_ready(url, service.name, as_json), hurry)
    return came


def _tell_ready(url: str, name: str, as_json: bool) -> None:
    told = json.dumps({"url": f"{url}/v1", "model": name}) if as_json else f"{name} is served at {url}/v1; Ctrl-C ends it"
    print(told, flush=True)


def _tell_end(service: Service) -> None:
    """Say what the end waits for, if it does."""
    count, grace = service.open, service.settings.grace
    if count and grace and sys.stderr is not None:
        answers = f"{count} open answer{'s' if count > 1 else ''}"
        print(f"mmsdk: {answers} may take up to {grace:g} s; Ctrl-C again ends at once", file=sys.stderr, flush=True)
