"""Train a walker and its stop verifier, and try both: `python -m mmsdk.apps.train_stop`. Seeded, offline, a quarter of an hour on one core.

Every stage leaves its result in the folder and is skipped when it is there. What is printed is one JSON object a row.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mmsdk.apps.train_stop.learn import rule_of, teach, verify, walked
from mmsdk.apps.train_stop.trial import rows
from mmsdk.apps.train_stop.walker import Walker, read, verifier, write

__all__ = ["main"]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mmsdk.apps.train_stop", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/train_stop"), help="where weights are kept")
    parser.add_argument("--steps", type=int, default=1500, help="steps of the walker's training")
    parser.add_argument("--rows", type=int, default=192, help="walkers in a step")
    parser.add_argument("--walks", type=int, default=4000, help="walks that the verifier learns from")
    parser.add_argument("--verifying", type=int, default=2500, help="steps of the verifier's training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--episodes", type=int, default=1000, help="held-out rooms (0: none)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Do all that is not done yet."""
    args = _arguments(argv)
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    walker, head = Walker(args.seed), verifier(args.seed)
    walking, stopping = args.folder / "walker.safetensors", args.folder / "verifier.safetensors"
    if not walking.exists():
        _told("walker", teach(walker, args.steps, args.rows, args.seed))
        write(walking, walker, {"made": f"seed {args.seed}, {args.steps} steps of {args.rows} walkers"})
    read(walking, walker)
    if not stopping.exists():
        _told("verifier", verify(head, walked(walker, args.walks, args.seed + 1), args.verifying, seed=args.seed))
        # far fewer walks tell two thresholds than a network
        rule = rule_of(head.eval(), walked(walker, max(1, args.walks // 4), args.seed + 2))
        made = f"seed {args.seed}, {args.verifying} steps on {args.walks} walks"
        write(stopping, head, {"accept": repr(rule.accept), "force": repr(rule.force), "made": made})
    for row in rows(args.episodes, args.folder) if args.episodes else ():
        print(json.dumps(row), flush=True)


def _told(name: str, losses: Iterator[float]) -> None:
    """Learn, and say now and then how it goes."""
    lately = list[float]()
    for step, loss in enumerate(losses, start=1):
        lately.append(loss)
        if step % 100 == 0:
            print(json.dumps({name: step, "loss": sum(lately) / len(lately)}), flush=True)
            lately.clear()


if __name__ == "__main__":
    main()
