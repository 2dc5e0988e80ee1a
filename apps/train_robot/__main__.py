"""Train the default robot policy: `python -m mmsdk.apps.train_robot`. Resumable, seeded, offline; Ctrl-C loses at most 250 steps.

Collects demonstrations of MT10's tasks in simulation, encodes their pictures once, learns to see and to act, and writes the policy's file.
Every stage leaves its result in the folder and is skipped when it is there. What the policy is worth, `mmsdk bench robot` tells.
Exit codes are those of `mmsdk`: 130 where Ctrl-C ended it, 2 for what the user can mend, 1 for weights that cannot be had.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from mmsdk.apps.interrupts import INTERRUPTED
from mmsdk.apps.train_mini.needs import check_rendering, screenless
from mmsdk.apps.train_robot.features import basis, encoded, standings
from mmsdk.apps.train_robot.learn import Class, Learner, Recipe, errors, learn
from mmsdk.apps.train_robot.lessons import Lessons, Phrases, statistics_of
from mmsdk.errors import InputError, MmsdkError, WeightsError
from mmsdk.vla.default import WEIGHTS, Learned, action_network, eyes, write_learned
from mmsdk.vla.envs.metaworld import CAMERAS, TASKS, sawyer
from mmsdk.vla.envs.metaworld_orders import SIDE
from mmsdk.vla.heads.glance import Glance, GlanceConfig
from mmsdk.vla.heads.minisight import Lexicon
from mmsdk.weights.bundle import pull

__all__ = ["main"]

CHUNK = 16


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mmsdk.apps.train_robot", description=(__doc__ or "").splitlines()[0])
    recipe, sizes = Recipe(), GlanceConfig()
    parser.add_argument("--folder", type=Path, default=Path("build/train_robot"), help="where demonstrations and checkpoints are kept")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--demonstrations", type=int, default=50, help="of each task")
    parser.add_argument("--scenes", type=int, default=50, help="further scenes of each task, which are only looked at")
    parser.add_argument("--steps", type=int, default=recipe.steps, help="steps of training")
    parser.add_argument("--seeing", type=int, default=recipe.seeing, help="first steps of these, which learn only to see")
    parser.add_argument("--rows", type=int, default=recipe.rows, help="looks in a step")
    parser.add_argument("--width", type=int, default=sizes.width, help="width of the glance and of the action expert")
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="what the encoder computes in")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop training after so long; the next call goes on")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(argv)


def _demonstrations(args: argparse.Namespace) -> list[Path]:
    """A file for each task, each made by a program of its own: only one renderer may live in a process."""
    shards = [args.folder / "demonstrations" / f"{task}.safetensors" for task in args.tasks]
    shards[0].parent.mkdir(parents=True, exist_ok=True)
    if not all(shard.exists() for shard in shards):
        check_rendering()
    for task, shard in zip(args.tasks, shards, strict=True):
        if shard.exists():
            continue
        words = [task, str(args.seed), str(args.demonstrations), str(args.scenes), str(shard)]
        done = subprocess.run([sys.executable, "-m", "mmsdk.apps.train_robot.demonstrate", *words], env=screenless(), check=False)
        if done.returncode:
            raise InputError(f"its program ended with exit code {done.returncode}; what it said stands above", item=task)
        print(f"{task}: {args.demonstrations} demonstrations", flush=True)
    return shards


def _class(args: argparse.Namespace, config: GlanceConfig) -> tuple[Class, Glance]:
    """Everything that is learned from, and a glance that reduces features as it did."""
    parts, shards = pull("mini"), _demonstrations(args)
    encoder = eyes(parts["encoder"], args.dtype)
    found = basis(args.folder / "basis.safetensors", encoder, shards, config.kept)
    seen = [encoded(args.folder / "features", task, shard, encoder, found) for task, shard in zip(args.tasks, shards, strict=True)]
    lessons = Lessons.of(seen, shards, CHUNK)
    phrases = Phrases.of(Lexicon.of(parts["language"]), [TASKS[task] for task in args.tasks])
    places = standings(encoder, torch.zeros(len(CAMERAS), 3, SIDE, SIDE, dtype=torch.uint8))
    torch.manual_seed(args.seed)
    glance = Glance(config)
    glance.centre.copy_(found.centre)
    glance.axes.copy_(found.axes)
    black = found.black.repeat(len(CAMERAS), 1)
    return Class(lessons, phrases, places, black, statistics_of(lessons)), glance


def _run(args: argparse.Namespace) -> int:
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    config = GlanceConfig(width=args.width, heads=args.width // 32, inner=3 * args.width)
    room, glance = _class(args, config)
    recipe = Recipe(args.steps, args.seeing, args.rows, seed=args.seed)
    learner = Learner.of(glance, action_network(config, CHUNK, sawyer()), recipe)
    print(f"{len(room.lessons)} looks, {sum(p.numel() for p in learner.both.parameters()) / 1e6:.2f} million weights", flush=True)
    done = _learned(args, room, learner, recipe)
    if done < recipe.steps:
        print(f"{done} of {recipe.steps} steps; the same command goes on from there", flush=True)
        return 0
    glance, network = learner.mean
    made = (
        f"seed {args.seed}, {args.demonstrations} demonstrations a task, {len(room.lessons)} looks, {recipe.steps} steps of {recipe.rows}"
    )
    write_learned(args.folder / WEIGHTS.name, Learned(glance, network, room.statistics, made))
    print(f"{args.folder / WEIGHTS.name}: try it with mmsdk bench 'robot:suites=metaworld-mt10,weights={args.folder / WEIGHTS.name}'")
    return 0


def _learned(args: argparse.Namespace, room: Class, learner: Learner, recipe: Recipe) -> int:
    """The steps that are done when training is at its end, or the time is over."""
    begun, done, sums, count = time.monotonic(), 0, dict[str, float](), 0
    with closing(learn(room, learner, recipe, args.folder / "checkpoint.safetensors")) as learning:
        for done, losses in learning:
            sums, count = {name: sums.get(name, 0.0) + loss for name, loss in losses.items()}, count + 1
            if done % 250 == 0:
                print(json.dumps({"step": done, **{name: round(total / count, 5) for name, total in sums.items()}}), flush=True)
                sums, count = {}, 0
            if done in (recipe.seeing, recipe.steps):
                _tell(args, room, learner)
            if time.monotonic() - begun > args.seconds:
                break
    return done or recipe.steps


def _tell(args: argparse.Namespace, room: Class, learner: Learner) -> None:
    for row in errors(room, learner.mean[0]):
        print(json.dumps({**row, "task": args.tasks[int(row["task"])]}), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all stages that are not done yet; the exit code. What the user can mend is one line on stderr, without a traceback."""
    args = _arguments(argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the last stage or checkpoint", file=sys.stderr)
        return INTERRUPTED
    except MmsdkError as error:
        print(f"train_robot: {error}", file=sys.stderr)
        return 1 if isinstance(error, WeightsError) else 2


if __name__ == "__main__":
    raise SystemExit(main())
