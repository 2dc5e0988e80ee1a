"""`mmsdk demo`: the page at an address of this machine, until Ctrl-C or SIGTERM; with --json one object is printed when it is there."""

import argparse
import asyncio
import contextlib
import io
import json
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import gradio as gr
import torch

from mmsdk.apps.demo import SHIPPED
from mmsdk.apps.interrupts import handling, leave
from mmsdk.apps.web.filming import Films
from mmsdk.apps.web.models import Models
from mmsdk.apps.web.page import build
from mmsdk.apps.web.theme import style, theme
from mmsdk.diffusion.filming import VideoGeneration
from mmsdk.errors import InputError
from mmsdk.families import open_model
from mmsdk.kv.memory import memory_of
from mmsdk.legibility import LegibilityWarning
from mmsdk.models.types import VLM
from mmsdk.named import check_maker
from mmsdk.pipeline import find_device, pipeline
from mmsdk.precision import resolve_dtype, resolve_quantize
from mmsdk.vision.intake import Limits
from mmsdk.vision.values import cause

__all__ = ["opened", "run"]

PIXELS = 2**25  # of an upload, once decoded


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted, or until the model cannot be loaded. Wrong flags are told before it is."""
    # said on the page, below the answer
    warnings.simplefilter("ignore", LegibilityWarning)
    models, films = _models(args), _films(args)
    with opened(models, args.host, args.port, args.max_upload_mb, args.share, films) as url, _until_signalled() as stop:
        first = models.begin(models.first)
        first.add_done_callback(lambda loaded: stop.set() if loaded.exception() else None)
        print(json.dumps({"url": url, "model": args.model}) if args.json else f"the demo is at {url}; Ctrl-C ends it", flush=True)
        stop.wait()
        if first.done():
            # where it cannot be had, there is nothing to show
            first.result()
    return 0


def _models(args: argparse.Namespace) -> Models:
    """The models of the page, by what was said of them. Raises as `pipeline` does for words that cannot be, before anything is loaded."""
    place = find_device(args.device)
    dtype = resolve_dtype(args.dtype, place)
    resolve_quantize(args.quantize, place)
    memory_of(args.kv)

    def load(weights: str) -> VLM:
        return open_model(args.model, dtype, place, resolve_quantize(weights, place), args.gguf_file)

    return Models(load, args.model, _short(dtype), args.quantize, args.kv)


def _films(args: argparse.Namespace) -> Films | None:
    """The model that makes clips, if one was named. Raises ModelError for a folder that there is not."""
    if not args.video_model:
        return None
    check_maker(args.video_model)

    def load() -> VideoGeneration:
        return pipeline("video-generation", args.video_model, dtype=args.dtype, device=args.device, progress=False)

    return Films(load, Path(args.video_model).name)


@contextlib.contextmanager
def opened(
    models: Models, host: str = "127.0.0.1", port: int = 0, megabytes: int = 64, share: bool = False, films: Films | None = None
) -> Iterator[str]:
    """Serve the page from threads beside this program, and give its address; port 0 takes a free one.

    Raises InputError where the port cannot be had, and for an upload limit below 1 MB.
    """
    if megabytes < 1:
        raise InputError(f"it is {megabytes}, expected at least 1 MB", item="max-upload-mb")
    settings = {
        "server_name": f"[{host}]" if ":" in host else host, "server_port": _free(host, port), "max_file_size": megabytes * 2**20,
        "share": share, "prevent_thread_lock": True, "quiet": True, "inline": False, "allowed_paths": [str(SHIPPED)], "footer_links": [],
        "run_history": False, "enable_monitoring": False, "ssr_mode": False, "mcp_server": False, "pwa": False,
        "state_session_capacity": 64, "theme": theme(), "head": _head(),
    }  # fmt: skip
    limits = Limits(held_bytes=megabytes * 2**20, pixels=PIXELS)
    # in a thread with an event loop of its own: where there is none, Gradio makes some and leaves them open
    with ThreadPoolExecutor(1) as pool:
        page, url = pool.submit(lambda: asyncio.run(_launched(models, limits, settings, films))).result()
    try:
        if not url:
            raise InputError("no public address was given; leave it out, or see that Gradio's server can be reached", item="share")
        yield url
    finally:
        page.close(verbose=False)
        models.close()
        if films is not None:
            films.close()


async def _launched(models: Models, limits: Limits, settings: Mapping[str, Any], films: Films | None) -> tuple[gr.Blocks, str]:
    """The page, and its address: the public one where that was asked for, "" where that was not to be had."""
    page = build(models, limits, films)
    # it greets, and speaks of itself
    with contextlib.redirect_stdout(io.StringIO()):
        _, local, shared = page.launch(**settings)
    return page, ((shared or "") if settings["share"] else local).rstrip("/")


def _head() -> str:
    """Style as it is, for what Gradio takes as `css` it rewrites; and the width of phones."""
    return f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style()}</style>'


def _free(host: str, port: int) -> int:
    """The port, or a free one in the place of 0. Raises InputError where it cannot be had."""
    if not 0 <= port < 2**16:
        raise InputError(f"{port} is no port; there are 0 (any free one) to 65535", item="port")
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as door:
            found: int = door.getsockname()[1]
    except OSError as error:
        raise InputError(f"cannot listen there: {cause(error)}", item=f"{host}:{port}") from None
    return found


@contextlib.contextmanager
def _until_signalled() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; a second one does not wait for anything."""
    stop = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(number, leave)
        stop.set()

    with handling(interrupt):
        yield stop


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
