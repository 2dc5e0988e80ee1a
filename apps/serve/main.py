"""`mmsdk serve`: load a model and serve it until Ctrl-C or SIGTERM.

With --json one object is printed when the server is ready. A second signal does not wait for what runs.
"""

import argparse
import asyncio
import json
import logging
import signal
import socket
import warnings
from pathlib import Path
from types import FrameType

from mmsdk.apps.adapters import adapted
from mmsdk.apps.console import busy
from mmsdk.apps.serve.server import listening, serve
from mmsdk.apps.serve.service import Service
from mmsdk.apps.serve.settings import Settings
from mmsdk.errors import InputError
from mmsdk.legibility import LegibilityWarning
from mmsdk.pipeline import pipeline
from mmsdk.vision.values import cause

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted: 0 where the server came to its end in order. Wrong flags are told before a model is loaded."""
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
        keys=_keys(args.api_key_file) if args.api_key_file else (),
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
        asyncio.run(_until_signalled(service, door, args.json))
    return 0


async def _until_signalled(service: Service, door: socket.socket, as_json: bool) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler)
        loop.call_soon_threadsafe(stop.set)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        await serve(service, door, stop, lambda url: _tell_ready(url, service.name, as_json))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell_ready(url: str, name: str, as_json: bool) -> None:
    told = json.dumps({"url": f"{url}/v1", "model": name}) if as_json else f"{name} is served at {url}/v1; Ctrl-C ends it"
    print(told, flush=True)


def _keys(path: str) -> tuple[str, ...]:
    """The keys in a file, one a line."""
    try:
        keys = tuple(Path(path).read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {cause(error)}", item=path) from None
    if not keys:
        raise InputError("it is empty; write a key on each line", item=path)
    return keys
