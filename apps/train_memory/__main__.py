"""Train and compare memories: `python -m mmsdk.apps.train_memory`. Resumable, seeded, offline; Ctrl-C loses at most 200 steps.

Every condition (none, slow, fast, dual) learns the same lessons for as long, then acts in the same held-out episodes of both tasks. What is
printed is one JSON object a row.
"""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from mmsdk.apps.train_memory.learn import learn, load
from mmsdk.apps.train_memory.student import Recipe
from mmsdk.apps.train_memory.trial import trial
from mmsdk.vla.memory.dual import Ablation

__all__ = ["main"]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    recipe = Recipe()
    parser = argparse.ArgumentParser(prog="python -m mmsdk.apps.train_memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/train_memory"), help="where checkpoints are kept")
    parser.add_argument("--conditions", nargs="+", choices=get_args(Ablation), default=list(get_args(Ablation)))
    parser.add_argument("--steps", type=int, default=recipe.steps, help="steps of each condition")
    parser.add_argument("--rows", type=int, default=recipe.rows, help="episodes in a step")
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--ratio", type=float, default=recipe.ratio, help="share of a remembered block that is read when acting")
    parser.add_argument("--flow", type=int, default=recipe.flow, help="steps of the flow when acting")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop training after so long; the next call goes on")
    parser.add_argument("--episodes", type=int, default=100, help="held-out episodes of each task (0: none)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train every condition that is not done yet, and try each that is."""
    args = _arguments(argv)
    begun = time.monotonic()
    for condition in args.conditions:
        recipe = Recipe(condition, steps=args.steps, rows=args.rows, seed=args.seed, ratio=args.ratio, flow=args.flow)
        done = _trained(recipe, args.folder, begun + args.seconds)
        if done < recipe.steps:
            print(json.dumps({"condition": condition, "steps": done, "of": recipe.steps}), flush=True)
            return
        if args.episodes:
            student, _ = load(recipe, args.folder)
            for task in ("belt", "cue"):
                print(json.dumps(asdict(trial(student, recipe, task, args.episodes))), flush=True)


def _trained(recipe: Recipe, folder: Path, deadline: float) -> int:
    """The steps that the condition has learnt for when it is done or the time is over."""
    done, losses = recipe.steps, list[float]()
    with closing(learn(recipe, folder, recipe.steps)) as learning:
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
