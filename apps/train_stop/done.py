"""Whether an arm is done: the verifier of STOP behind the default robot policy: `python -m mmsdk.apps.train_stop.done`. Seeded, offline.

The policy never says that it is done. The verifier reads what its decoder knows at every answer, and learns from episodes that nothing
ends where the simulation says that the task is done; its rule is tuned on episodes that it has not learnt from, and tried on others. What
is printed is one JSON object a task. Every stage leaves its result in the folder and is skipped when it is there.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file
from torch import Tensor

from mmsdk.apps import kept
from mmsdk.apps.console import Cell
from mmsdk.apps.intervals import wilson
from mmsdk.apps.robots.episodes import HELD_OUT
from mmsdk.apps.train_stop.learn import Walks, rule_of, verify
from mmsdk.errors import InputError
from mmsdk.stages import Context
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.default import default_policy
from mmsdk.vla.drive import Drive, Session, Settings
from mmsdk.vla.envs.metaworld import TASKS, MetaWorld, missing
from mmsdk.vla.flow_model import FlowModel, Sight
from mmsdk.vla.heads.latte import StopVerifier, VerifierConfig
from mmsdk.vla.loop import Pace
from mmsdk.vla.policy import RobotPolicy
from mmsdk.vla.stop import Recorded, StopRule
from mmsdk.vla.worker import Delayed

__all__ = ["main", "row", "verifier", "watched"]

GO_ON = 1
"""The action that is no STOP."""
ASKED, ANSWERS = 6, 30
"""Ticks from one answer to the next, and how many answers an episode has."""
_TASKS = ("drawer-open-v3", "drawer-close-v3", "button-press-topdown-v3", "window-open-v3")


@dataclass(frozen=True, slots=True)
class Noting:
    """A sight that keeps what the decoder knew, answer by answer."""

    sight: Sight
    noted: list[Tensor] = field(default_factory=list)

    def prefix(
        self,
        pixels: Float[Tensor, "b c 3 h w"],
        present: Bool[Tensor, "b c"],
        ids: Int[Tensor, "b s"],
        said: Bool[Tensor, "b s"],
        room: int,
    ) -> Context:
        """See `Sight`."""
        context = self.sight.prefix(pixels, present, ids, said, room)
        self.noted.append(context.hidden[0])
        return context


def watched(task: str, seeds: Sequence[int]) -> Walks:
    """An episode for each seed, which goes on when the task is done: "near" is where it is, or was."""
    policy, clock = default_policy(), SimulatedClock()
    noting = _noting(policy)
    told = list[tuple[Tensor, Tensor]]()
    with MetaWorld(task, clock) as robot:
        settings, worker = Settings(Pace(ASKED, ASKED, ASKED, deadline=1.0)), partial(Delayed, clock=clock, latency=lambda request: 0.0)
        acting = replace(policy, model=replace(_flow(policy), sight=noting))
        drive = Session(robot, acting, clock, worker, settings).drive()
        for number, seed in enumerate(seeds):
            if number:
                drive.reset()
            robot.begin(seed)
            if not number:
                drive.warm_up()
            noting.noted.clear()
            told.append(_episode(robot, drive, noting))
    hidden, near = (torch.stack(part) for part in zip(*told, strict=True))
    return Walks(hidden, torch.full(near.shape, GO_ON), near)


def _episode(robot: MetaWorld, drive: Drive, noting: Noting) -> tuple[Float[Tensor, "t d"], Bool[Tensor, " t"]]:
    done = list[bool]()
    # ticks in which nothing is asked, because the hand is held, count too
    for _ in range(ASKED * ANSWERS * 2):
        drive.step()
        assert robot.seen is not None, "an episode has begun"
        done += [robot.seen.done] * (len(noting.noted) - len(done))
        if len(done) >= ANSWERS:
            break
    # an episode that was held for too long repeats its end
    hidden = [*noting.noted, *[noting.noted[-1]] * ANSWERS][:ANSWERS]
    return torch.stack(hidden).float(), torch.tensor([*done, *[done[-1]] * ANSWERS][:ANSWERS])


def _flow(policy: RobotPolicy) -> FlowModel:
    assert isinstance(policy.model, FlowModel), "the default policy is one"
    return policy.model


def _noting(policy: RobotPolicy) -> Noting:
    return Noting(_flow(policy).sight)


def verifier(hidden: int, seed: int = 0) -> StopVerifier:
    """One for a policy whose decoder is so wide."""
    torch.manual_seed(seed)
    return StopVerifier(VerifierConfig(hidden, 2, width=64, layers=2, heads=4, window=16, steps=64))


@torch.no_grad()
def row(task: str, head: StopVerifier, rule: StopRule, seen: Walks) -> dict[str, Cell]:
    """How episodes of a task end by this rule: rightly, too early, or not at all although the task was done."""
    opinion, _ = head(seen.hidden, seen.proposed)
    told = Recorded(opinion.probability, opinion.first, seen.proposed, seen.near)
    ends, n = told.ends(rule), len(seen.near)
    right = int(torch.nn.functional.pad(seen.near, (0, 1)).gather(1, ends[:, None]).sum())
    (low, high), report = wilson(right, n), told.report(rule)
    late = [int(end) - int(near.long().argmax()) for end, near in zip(ends, seen.near, strict=True) if end < ANSWERS and bool(near[end])]
    return {
        "suite": "done", "task": task, "condition": "verified", "success": right / n, "n": n, "ci_low": low, "ci_high": high,
        "oracle": float(seen.near.any(1).float().mean()), "false_stop": report.false_stop, "missed_stop": report.missed_stop,
        "late_s": sum(late) / max(1, len(late)) * ASKED / 20,
    }  # fmt: skip


def _kept(path: Path, task: str, seeds: Sequence[int]) -> Walks:
    """Those of the file, which is made where it is not there."""
    if not path.exists():
        seen = watched(task, seeds)
        kept.write(path, {"hidden": seen.hidden.half(), "near": seen.near})
    data = load_file(path)
    return Walks(data["hidden"].float(), torch.full(data["near"].shape, GO_ON), data["near"])


def main(argv: Sequence[str] | None = None) -> None:
    """Do all that is not done yet. Raises InputError where the simulation is not installed."""
    parser = argparse.ArgumentParser(prog="python -m mmsdk.apps.train_stop.done", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/train_done"), help="where episodes and weights are kept")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(_TASKS))
    parser.add_argument("--episodes", type=int, default=10, help="of each task to learn from; half as many to tune on, as many to try on")
    parser.add_argument("--steps", type=int, default=300, help="steps of the verifier's training")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    if lacks := missing():
        raise InputError(f"the simulation is not installed: {lacks}", item="metaworld")
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    sizes = {"learn": args.episodes, "tune": max(1, args.episodes // 2), "try": args.episodes}
    first = dict(zip(sizes, (HELD_OUT + 2000, HELD_OUT + 1000, HELD_OUT), strict=True))
    seen = {
        (use, task): _kept(args.folder / f"{task}-{use}-{n}.safetensors", task, range(first[use], first[use] + n))
        for task in args.tasks
        for use, n in sizes.items()
    }
    learnt, tuned = (_all([seen[use, task] for task in args.tasks]) for use in ("learn", "tune"))
    head = verifier(learnt.hidden.shape[2])
    for _ in verify(head, learnt, args.steps, rows=min(48, len(learnt.near))):
        pass
    rule = rule_of(head.eval(), tuned)
    facts = {"accept": repr(rule.accept), "force": repr(rule.force), "made": f"{args.steps} steps on {len(learnt.near)} episodes"}
    kept.write(args.folder / "done.safetensors", {name: tensor.half() for name, tensor in head.state_dict().items()}, facts)
    for task in args.tasks:
        print(json.dumps(row(task, head, rule, seen["try", task])), flush=True)


def _all(parts: Sequence[Walks]) -> Walks:
    return Walks(*(torch.cat([getattr(part, name) for part in parts]) for name in ("hidden", "proposed", "near")))


if __name__ == "__main__":
    main()
