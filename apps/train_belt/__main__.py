"""Train and compare memories on the belt: `python -m mmsdk.apps.train_belt`. Resumable, seeded, offline; Ctrl-C loses at most 200 steps.

Demonstrations of a script are simulated and drawn once; eyes are taught on them; then every condition (none, slow, fast, dual) learns the
same lessons for as long, and acts in the same held-out episodes of both tasks. What is printed is one JSON object a row. Every stage leaves
its result in the folder and is skipped when it is there.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import get_args

import torch
from safetensors.torch import load_file

import mmsdk
from mmsdk.apps.kept import write
from mmsdk.apps.train_belt.eyes import Eyes, teach
from mmsdk.apps.train_belt.learn import export, learn, load
from mmsdk.apps.train_belt.lessons import Lessons
from mmsdk.apps.train_belt.rows import Suite, rows
from mmsdk.apps.train_belt.student import Recipe
from mmsdk.apps.train_mini.needs import check_rendering, screenless
from mmsdk.errors import InputError
from mmsdk.vla.memory.dual import Ablation

__all__ = ["main"]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    recipe = Recipe()
    parser = argparse.ArgumentParser(prog="python -m mmsdk.apps.train_belt", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/train_belt"), help="where demonstrations and checkpoints are kept")
    parser.add_argument("--conditions", nargs="+", choices=get_args(Ablation), default=list(get_args(Ablation)))
    parser.add_argument("--demonstrations", type=int, default=1500)
    parser.add_argument("--looks", type=int, default=600, help="steps in which the eyes are taught")
    parser.add_argument("--steps", type=int, default=recipe.steps, help="steps of each condition")
    parser.add_argument("--rows", type=int, default=recipe.rows, help="episodes in a step")
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop training after so long; the next call goes on")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--episodes", type=int, default=100, help="held-out episodes of each task (0: none)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Do all that is not done yet."""
    args = _arguments(argv)
    begun = time.monotonic()
    torch.set_num_threads(args.threads)
    data = _demonstrations(args)
    lessons = Lessons.of(data, _eyes(data, args))
    for condition in args.conditions:
        recipe = Recipe(condition, steps=args.steps, rows=args.rows, seed=args.seed)
        done = _trained(lessons, recipe, args.folder, begun + args.seconds)
        if done < recipe.steps:
            print(json.dumps({"condition": condition, "steps": done, "of": recipe.steps}), flush=True)
            return
        made = f"seed {args.seed}, {len(lessons.go)} demonstrations, {done} steps of {args.rows} episodes"
        export(args.folder / f"{condition}.safetensors", load(recipe, args.folder)[0], made)
    for suite in get_args(Suite) if args.episodes else ():
        for row in rows(suite, args.episodes, args.conditions, args.folder):
            print(json.dumps(row), flush=True)


def _demonstrations(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Those of the file, which is made where it is not there."""
    path = args.folder / f"demonstrations-{args.demonstrations}-{args.seed}.safetensors"
    if not path.exists():
        check_rendering()
        command = [sys.executable, "-m", "mmsdk.apps.train_belt.gather", str(path.resolve()), str(args.demonstrations), str(args.seed)]
        made = subprocess.run(command, check=False, env=screenless(), cwd=Path(mmsdk.__file__).parents[1])
        if made.returncode:
            raise InputError(f"its program ended with exit code {made.returncode}; what it said stands above", item="demonstrations")
    return load_file(path)


def _eyes(data: dict[str, torch.Tensor], args: argparse.Namespace) -> Eyes:
    path = args.folder / "eyes.safetensors"
    if not path.exists():
        eyes, error = teach(data, args.looks, seed=args.seed)
        print(json.dumps({"eyes": args.looks, "off by metres": error}), flush=True)
        write(path, {name: tensor.half() for name, tensor in eyes.state_dict().items()})
    return Eyes.of(path)


def _trained(lessons: Lessons, recipe: Recipe, folder: Path, deadline: float) -> int:
    """The steps that the condition has learnt for when it is done or the time is over."""
    done, losses = recipe.steps, list[float]()
    with closing(learn(lessons, recipe, folder)) as learning:
        for done, loss in learning:
            losses.append(loss)
            if done % 100 == 0:
                print(json.dumps({"condition": recipe.condition, "step": done, "loss": sum(losses) / len(losses)}), flush=True)
                losses.clear()
            if done < recipe.steps and time.monotonic() > deadline:
                break
    return done


if __name__ == "__main__":
    main()
