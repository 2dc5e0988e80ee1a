"""Robot policies in closed loop on seeds that no training began with: the default one, memories on a belt, a stop verifier."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmsdk.apps.console import Cell
from mmsdk.apps.intervals import wilson
from mmsdk.apps.robots.episodes import HELD_OUT, MODES, Condition, Ended, condition, played
from mmsdk.apps.train_belt import rows as belt
from mmsdk.apps.train_stop import trial as stop
from mmsdk.errors import InputError
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.default import WEIGHTS, default_policy
from mmsdk.vla.envs.metaworld import TASKS, MetaWorld, missing
from mmsdk.vla.latency import percentiles
from mmsdk.vla.policy import RobotPolicy

__all__ = ["Robot"]

DELAYS = (50, 100, 200, 400)
ALL = ("default", "blind", "wrong-instruction", "tokens-25", *(f"delay-{ms}-{mode}" for ms in DELAYS for mode in MODES))


@dataclass(frozen=True, slots=True)
class Robot:
    """`episodes` of each task under each of the `conditions`, which are joined by "+"; "all" adds delays with every chunking mode.

    Success is the environment's own flag; an episode that is not done after 300 steps, or in which the hand stands still, has failed.
    The other suites have conditions of their own and are told `episodes` and `weights`, a folder, alone; 0 episodes are 20 a task, and 100
    of each of these.
    """

    suite: Literal["metaworld-mt10", "moving-belt", "cue", "navigation"] = "metaworld-mt10"
    episodes: int = 0
    conditions: str = "default+blind+wrong-instruction+tokens-25"
    tasks: str = ""
    weights: str = ""

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {suite, task, condition, success, n, ci_low, ci_high, latency_p50_ms, latency_p95_ms, unsafe}.

        Intervals are Wilson's at 95 %; latency is what the policy's answers really took; of each condition one more row is of all tasks.
        Raises InputError for what is not known, and where the simulation is not installed.
        """
        count = self.episodes or (20 if self.suite == "metaworld-mt10" else 100)
        if self.suite == "navigation":
            return list(stop.rows(count, Path(self.weights) if self.weights else stop.SHIPPED))
        if self.suite != "metaworld-mt10":
            return list(belt.rows(self.suite, count, folder=Path(self.weights) if self.weights else belt.SHIPPED))
        under = [condition(name) for name in (ALL if self.conditions == "all" else self.conditions.split("+"))]
        tasks = self.tasks.split("+") if self.tasks else list(TASKS)
        if unknown := [task for task in tasks if task not in TASKS]:
            raise InputError(f"there is {', '.join(TASKS)}", item=unknown[0])
        if count < 1 or missing():
            raise InputError(missing() or f"{count} episodes, expected at least 1", item=self.suite)
        policies = self._policies(under)
        found: dict[str, list[tuple[list[Ended], list[float]]]] = {each.name: [] for each in under}
        rows: list[dict[str, Cell]] = []
        for task in tasks:
            clock = SimulatedClock()
            with MetaWorld(task, clock) as robot:
                for each in under:
                    seeds = range(HELD_OUT, HELD_OUT + count)
                    found[each.name].append(played(robot, clock, policies[each.mode, each.compress], each, seeds))
                    rows.append(self._row(task, each.name, *found[each.name][-1]))
                    print(f"{task} {each.name}: {rows[-1]['success']:.2f}", file=sys.stderr, flush=True)
        for name, parts in found.items():
            rows.append(self._row("all", name, [end for ended, _ in parts for end in ended], [ms for _, took in parts for ms in took]))
        return rows

    def _policies(self, under: Sequence[Condition]) -> dict[tuple[str, str], RobotPolicy]:
        weights = self.weights or WEIGHTS
        kinds = dict.fromkeys((each.mode, each.compress) for each in under)
        return {(mode, few): default_policy(chunking=MODES[mode][0], compress=few, weights=weights) for mode, few in kinds}

    def _row(self, task: str, name: str, ended: Sequence[Ended], took: Sequence[float]) -> dict[str, Cell]:
        done, times = sum(each.success for each in ended), percentiles(list(took))
        low, high = wilson(done, len(ended))
        return {
            "suite": self.suite,
            "task": task,
            "condition": name,
            "success": done / len(ended),
            "n": len(ended),
            "ci_low": low,
            "ci_high": high,
            "latency_p50_ms": times.p50,
            "latency_p95_ms": times.p95,
            "unsafe": sum(each.unsafe for each in ended),
        }
