"""`mmsdk robot --env metaworld/drawer-open-v3 --episodes 5`: the default policy under the control loop, in simulation.

With --gif a clip shows the first episode, as both cameras see it.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mmsdk.apps.console import busy
from mmsdk.apps.robots.episodes import HELD_OUT, Condition, Ended, played, unwatched
from mmsdk.apps.robots.film import Film
from mmsdk.errors import InputError
from mmsdk.vision.films import check_film, save_film
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.default import default_policy
from mmsdk.vla.envs.metaworld import TASKS, MetaWorld, missing
from mmsdk.vla.latency import percentiles

__all__ = ["run"]

SUITE = "metaworld/"
USAGE = "write: mmsdk robot --env metaworld/drawer-open-v3 --episodes 5"


def run(args: argparse.Namespace) -> int:
    """Play the episodes and say how they ended; 0 whatever the policy could do."""
    if len(args.words) != 1:
        raise InputError(f"expected one task; {USAGE}", item=" ".join(args.words))
    env = args.words[0]
    task = _task(env)
    if lacks := missing():
        raise InputError(f"the simulation is not installed: {lacks}", item=env)
    if args.gif:
        check_film(Path(args.gif))
    if args.episodes < 1:
        raise InputError(f"{args.episodes} episodes, expected at least 1", item="--episodes")
    with busy("loading the policy"):
        policy = default_policy(compress=args.compress or "identity")
    clock, film = SimulatedClock(), Film(HELD_OUT)
    seeds, look = range(HELD_OUT, HELD_OUT + args.episodes), film if args.gif else unwatched
    with MetaWorld(task, clock) as robot, busy(f"{args.episodes} episodes of {task}"):
        ended, took = played(robot, clock, policy, Condition("default"), seeds, look)
    if args.gif:
        save_film(film.clip, Path(args.gif))
    times = percentiles(took)
    told = {
        "env": env, "instruction": TASKS[task][0], "success": sum(each.success for each in ended) / len(ended), "n": len(ended),
        "latency_p50_ms": times.p50, "latency_p95_ms": times.p95, "unsafe": sum(each.unsafe for each in ended),
        "episodes": [asdict(each) for each in ended],
    }  # fmt: skip
    print(json.dumps(told) if args.json else _readable(TASKS[task][0], ended), flush=True)
    return 0


def _task(env: str) -> str:
    task = env.removeprefix(SUITE)
    if not env.startswith(SUITE) or task not in TASKS:
        raise InputError(f"there is {', '.join(SUITE + name for name in TASKS)}", item=env)
    return task


def _readable(instruction: str, ended: Sequence[Ended]) -> str:
    ends = [f"  seed {each.seed}: {_how(each)} after {each.steps} steps" for each in ended]
    return "\n".join([f'"{instruction}": {sum(each.success for each in ended)} of {len(ended)}', *ends])


def _how(each: Ended) -> str:
    return "done" if each.success else "stalled" if each.stalled else "not done"
