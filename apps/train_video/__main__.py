"""Train the small video model: `python -m mmsdk.apps.train_video`. Resumable, seeded, offline; Ctrl-C loses nothing.

Trains the model, writes it to `FOLDER/model`, where `mmsdk imagine --model FOLDER/model` finds it, teaches the judge, and prints what that
reads in clips of held-out sentences. What is done is not done again. Exit codes are those of `mmsdk`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from mmsdk.vision.films import sheet
from mmsdk.apps.interrupts import INTERRUPTED
from mmsdk.apps.train_mini.needs import check_compiling
from mmsdk.apps.train_video.judge import open_judge, teach
from mmsdk.apps.train_video.learn import Recipe
from mmsdk.apps.train_video.loop import train
from mmsdk.apps.train_video.score import asked, drawn_score, score
from mmsdk.diffusion.imagine import open_imaginer, pixels, save_imaginer
from mmsdk.errors import MmsdkError
from mmsdk.precision import native_bfloat16

__all__ = ["JUDGE", "MODEL", "main"]

JUDGE, MODEL = "judge.safetensors", "model"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mmsdk.apps.train_video", description=(__doc__ or "").splitlines()[0])
    recipe = Recipe()
    parser.add_argument("--folder", type=Path, default=Path("build/train_video"), help="where checkpoints are kept, and the model")
    told = ", ".join(f"{stage.steps} of {stage.side} pixels a side" for stage in recipe.stages)
    parser.add_argument("--steps", type=int, nargs=3, default=[stage.steps for stage in recipe.stages], metavar="N", help=f"steps: {told}")
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto is bfloat16 where it is native")
    parser.add_argument("--every", type=float, default=180.0, help="seconds from one checkpoint to the next")
    parser.add_argument("--stop-after", type=int, help="end after so many steps; the next call goes on")
    parser.add_argument("--evaluate", type=int, default=48, help="held-out sentences to make clips of at the end (0: none)")
    parser.add_argument("--sampling", type=int, default=20, help="steps of each of these clips")
    parser.add_argument("--now", action="store_true", help="write and try the model as it stands, and train no further")
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile (slower, no C++ compiler needed)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(argv)


def _run(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    stages = [replace(stage, steps=steps) for stage, steps in zip(Recipe().stages, args.steps, strict=True)]
    recipe = Recipe(tuple(stages), seed=args.seed)
    dtype = torch.bfloat16 if args.dtype == "bfloat16" or (args.dtype == "auto" and native_bfloat16()) else torch.float32
    stop_after, compiled = 0 if args.now else args.stop_after, not args.no_compile and not args.now
    if compiled:
        check_compiling()
    done, learner = train(recipe, args.folder, dtype, every=args.every, stop_after=stop_after, compiled=compiled)
    if done < recipe.steps and not args.now:
        print(f"\nstopped after {done} of {recipe.steps} steps; the same command goes on from there", file=sys.stderr)
        return INTERRUPTED if args.stop_after is None else 0
    save_imaginer(args.folder / MODEL, learner.imaginer(recipe))
    if not (args.folder / JUDGE).exists():
        print(json.dumps({"of": "judge", "all five right on held-out drawn clips": teach(args.folder / JUDGE)}), flush=True)
    if args.evaluate:
        _tried(args, dtype)
    return 0


def _tried(args: argparse.Namespace, dtype: torch.dtype) -> None:
    judge, imagine = open_judge(args.folder / JUDGE), open_imaginer(args.folder / MODEL, dtype)
    print(json.dumps(drawn_score(judge, args.evaluate).row("drawn")))
    clips = list[torch.Tensor]()
    with tqdm(total=args.evaluate, desc="imagining", unit="clip", mininterval=10) as bar:

        def advance(clip: torch.Tensor) -> None:
            clips.append(clip)
            bar.update()

        found = score(imagine, judge, args.evaluate, args.sampling, advance)
    print(json.dumps(found.row("made") | {"steps": args.sampling}))
    sheet([pixels(clip[0]) for clip in clips[:8]], asked(args.evaluate).captions()[:8], args.folder / "clips.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Do what is not done yet; the exit code. What the user can mend is one line on stderr, without a traceback."""
    args = _arguments(argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    except MmsdkError as error:
        print(f"train_video: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
