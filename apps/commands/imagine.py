"""`mmsdk imagine "a red ball moves left" --out ball.mp4`: a clip of a sentence, by a small video model."""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from mmsdk.apps.console import busy
from mmsdk.apps.films import check_film, save_film
from mmsdk.diffusion.imagine import Imaginer, open_imaginer
from mmsdk.errors import InputError
from mmsdk.pipeline import find_device
from mmsdk.precision import resolve_dtype

__all__ = ["run"]

_SHIPPED = "mini"


def run(args: argparse.Namespace) -> int:
    """Make the clip and write it. What is wrong with the words is told before anything is made."""
    out = Path(args.out)
    check_film(out)
    if args.steps < 1:
        raise InputError(f"it is {args.steps}, expected at least 1", item="--steps")
    device = find_device(args.device)
    with busy(f"loading {args.model}"):
        imagine = _opened(args.model, resolve_dtype(args.dtype, device), device)
    begun = time.perf_counter()
    with _told(args.steps, args.json) as advance:
        made = imagine(
            args.text, seed=args.seed, steps=args.steps, scale=args.guidance, coarse=args.coarse, attention=args.attention,
            cache=args.cache, advance=advance,
        )  # fmt: skip
    save_film(made.video, out)
    seconds = time.perf_counter() - begun
    if args.json:
        told = {"passes": made.cost.passes, "tokens": made.cost.tokens, "skipped": dict(made.cost.skipped)}
        print(json.dumps({"out": str(out), "text": args.text, "seed": args.seed, "seconds": round(seconds, 2), **told}))
    else:
        print(f"{out}: {len(made.video.frames)} frames in {seconds:.1f} s")
    return 0


def _opened(name: str, dtype: torch.dtype, device: torch.device) -> Imaginer:
    if name == _SHIPPED:
        how = "train one with `python -m mmsdk.apps.train_video` and name its folder: --model build/train_video/model"
        raise InputError(f"no video model comes with mmsdk yet; {how}", item=name)
    if not Path(name).is_dir():
        raise InputError("there is no such folder; `python -m mmsdk.apps.train_video` trains a model and writes one", item=name)
    return open_imaginer(name, dtype, device)


@contextmanager
def _told(steps: int, silent: bool) -> Iterator[Callable[[int], None]]:
    """A bar of the steps on stderr, where that is a terminal."""
    with tqdm(total=steps, desc="imagining", unit="step", leave=False, disable=True if silent else None) as bar:

        def advance(step: int) -> None:
            bar.update(step - bar.n)

        yield advance
