"""`mmsdk imagine "a red ball moves left" --out ball.mp4`: a clip of a sentence, by a video model."""

import argparse
import json
import time
from pathlib import Path

from mmsdk.apps.console import busy
from mmsdk.errors import InputError
from mmsdk.pipeline import pipeline
from mmsdk.vision.films import check_film

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Make the clip and write it. What is wrong with the words is told before anything is made."""
    out = Path(args.out)
    check_film(out)
    if args.steps is not None and args.steps < 1:
        raise InputError(f"it is {args.steps}, expected at least 1", item="--steps")
    with busy(f"loading {args.model}"):
        pipe = pipeline("video-generation", args.model, dtype=args.dtype, device=args.device, progress=not args.json)
    begun = time.perf_counter()
    clip = pipe(
        args.text, seed=args.seed, steps=args.steps, guidance=args.guidance, against=args.against, two_stage=args.coarse,
        attention=args.attention, cache=args.cache, frames=args.length, height=args.height, width=args.width,
    )  # fmt: skip
    clip.save(out)
    seconds = time.perf_counter() - begun
    if args.json:
        told = {"passes": clip.cost.passes, "tokens": clip.cost.tokens, "skipped": dict(clip.cost.skipped)}
        print(json.dumps({"out": str(out), "text": args.text, "seed": args.seed, "seconds": round(seconds, 2), **told}))
    else:
        print(f"{out}: {len(clip.frames)} frames in {seconds:.1f} s")
    return 0
