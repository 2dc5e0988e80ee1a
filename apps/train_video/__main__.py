"""Train the small video models: `python -m mmsdk.apps.train_video`. Resumable, seeded, offline; Ctrl-C loses nothing.

Trains the model, writes it to `FOLDER/model`, where `mmsdk imagine --model FOLDER/model` finds it, teaches the judge, and prints what that
reads in clips of held-out sentences. What is done is not done again. Exit codes are those of `mmsdk`.

`--kind world` trains a model that goes frame by frame through a larger world, by actions, and `--kind upscaler` the map between the two
stages of the first, which is written beside it. What has not come to its end is not written, unless by `--now`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from mmsdk.apps.interrupts import INTERRUPTED
from mmsdk.apps.train_mini.needs import check_compiling
from mmsdk.apps.train_video import finer, roam
from mmsdk.apps.train_video.judge import open_judge, teach
from mmsdk.apps.train_video.learn import CONFIG, Recipe, loss_of
from mmsdk.apps.train_video.loop import Learner, Lesson, train
from mmsdk.apps.train_video.returning import returned
from mmsdk.apps.train_video.roam import RECIPE
from mmsdk.apps.train_video.score import asked, drawn_score, score
from mmsdk.diffusion.dit import DiTConfig
from mmsdk.diffusion.imagine import UPSCALER, open_imaginer, pixels, save_imaginer
from mmsdk.diffusion.upscale import open_upscaler, save_upscaler
from mmsdk.errors import MmsdkError
from mmsdk.precision import native_bfloat16
from mmsdk.vision.films import sheet

__all__ = ["JUDGE", "MODEL", "main"]

JUDGE, MODEL = "judge.safetensors", "model"
_UNREAD: dict[str, tuple[str, ...]] = {"clips": (), "world": ("sampling",), "upscaler": ("dtype", "no_compile", "sampling")}
"""What a kind does not read."""
_FOLDERS = {"clips": "build/train_video", "world": "build/train_world", "upscaler": "build/train_video"}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mmsdk.apps.train_video", description=(__doc__ or "").splitlines()[0])
    recipe = Recipe()
    parser.add_argument("--kind", choices=tuple(_FOLDERS), default="clips", help="what is trained")
    parser.add_argument(
        "--folder", type=Path, help=f"where checkpoints are kept, and the model; {_FOLDERS['clips']}, or {_FOLDERS['world']}"
    )
    told = ", ".join(f"{stage.steps} of {stage.side} pixels a side" for stage in recipe.stages)
    parser.add_argument(
        "--steps", type=int, nargs="+", metavar="N", help=f"steps: {told}; of a world {RECIPE.steps}, of an upscaler {finer.STEPS}"
    )
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto is bfloat16 where it is native")
    parser.add_argument("--every", type=float, default=180.0, help="seconds from one checkpoint to the next")
    parser.add_argument("--stop-after", type=int, help="end after so many steps; the next call goes on")
    parser.add_argument("--evaluate", type=int, default=48, help="held-out sentences, worlds or clips to try it on at the end (0: none)")
    parser.add_argument("--sampling", type=int, default=20, help="steps of each clip of a sentence")
    parser.add_argument("--now", action="store_true", help="write and try what is trained as it stands, and train no further")
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile (slower, no C++ compiler needed)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    args.folder = args.folder or Path(_FOLDERS[args.kind])
    usual = {"clips": [stage.steps for stage in recipe.stages], "world": [RECIPE.steps], "upscaler": [finer.STEPS]}[args.kind]
    if len(args.steps or usual) != len(usual) or min(args.steps or usual) < 0:
        parser.error(f"--steps takes {len(usual)} numbers of at least 0 for --kind {args.kind}")
    args.steps = args.steps or usual
    for name in _UNREAD[args.kind]:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} is not for --kind {args.kind}")
    return args


def _run(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    return {"clips": _clips, "world": _world, "upscaler": _upscaler}[args.kind](args)


def _clips(args: argparse.Namespace) -> int:
    stages = [replace(stage, steps=steps) for stage, steps in zip(Recipe().stages, args.steps, strict=True)]
    recipe = Recipe(tuple(stages), seed=args.seed)
    learner = _learned(args, recipe, CONFIG, loss_of)
    if learner is None:
        return INTERRUPTED if args.stop_after is None else 0
    save_imaginer(args.folder / MODEL, learner.imaginer(recipe))
    if not (args.folder / JUDGE).exists():
        print(json.dumps({"of": "judge", "all five right on held-out drawn clips": teach(args.folder / JUDGE)}), flush=True)
    if args.evaluate:
        _tried(args, _dtype(args))
    return 0


def _world(args: argparse.Namespace) -> int:
    recipe = replace(RECIPE, stages=(replace(RECIPE.stages[0], steps=args.steps[0]),), seed=args.seed)
    learner = _learned(args, recipe, roam.ROAMING, roam.loss_of)
    if learner is None:
        return INTERRUPTED if args.stop_after is None else 0
    roam.save(args.folder / MODEL, learner.imaginer(recipe))
    if args.evaluate:
        print(json.dumps(returned(args.folder / MODEL, args.evaluate).row()))
    return 0


def _upscaler(args: argparse.Namespace) -> int:
    done, upscaler = finer.taught(args.folder, args.steps[0], args.every, 0 if args.now else args.stop_after, args.seed)
    if _stopped(args, done, args.steps[0]):
        return INTERRUPTED if args.stop_after is None else 0
    target = args.folder / MODEL / UPSCALER
    target.parent.mkdir(exist_ok=True)
    save_upscaler(target, upscaler)
    if args.evaluate:
        print(json.dumps({"of": "upscaler", "steps": done, **finer.gained(open_upscaler(target, 3), args.evaluate)}))
    return 0


def _learned(args: argparse.Namespace, recipe: Recipe, config: DiTConfig, lesson: Lesson) -> Learner | None:
    """What was learned; none where the recipe is not at its end yet."""
    stop_after, compiled = 0 if args.now else args.stop_after, not args.no_compile and not args.now
    if compiled:
        check_compiling()
    done, learner = train(recipe, args.folder, _dtype(args), config, args.every, stop_after, compiled, lesson)
    return None if _stopped(args, done, recipe.steps) else learner


def _stopped(args: argparse.Namespace, done: int, steps: int) -> bool:
    """Whether there is more to learn before it is written, and that told."""
    short = done < steps and not args.now
    if short:
        print(f"\nstopped after {done} of {steps} steps; the same command goes on from there", file=sys.stderr)
    return short


def _dtype(args: argparse.Namespace) -> torch.dtype:
    return torch.bfloat16 if args.dtype == "bfloat16" or (args.dtype == "auto" and native_bfloat16()) else torch.float32


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
