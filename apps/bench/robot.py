"""Robot policies in closed loop on seeds that no training began with: the default one, memories on a belt, a stop verifier, a broken loop.

mmsdk bench robot --json                                         everything, some hours on one core
mmsdk bench robot:saved=rows.jsonl                               writes each part there when it is done, and goes on from there
mmsdk bench robot:suites=cue+moving-belt                         some suites
mmsdk bench robot:suites=metaworld-mt10,conditions=default       one condition, or several joined by "+"; tasks=reach-v3 likewise

Simulated time stands still while a policy thinks, or goes on for as long as a condition says: what succeeds does not hang on the machine,
or on what else it does. Latencies do. Those of MT10 are parts of their own, a few minutes together: `timing=false` leaves them out while
the machine is busy, and the same command without it, on an idle one, adds them to what the file holds.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

from tqdm import tqdm

from mmsdk.apps.console import Cell
from mmsdk.apps.intervals import wilson
from mmsdk.apps.memory.saved import Rows, resumed
from mmsdk.apps.robots.aims import aims
from mmsdk.apps.robots.episodes import HELD_OUT, MODES, Condition, Ended, condition, played
from mmsdk.apps.robots.faults import CONTROLS, FAULTS, broken_run, judge
from mmsdk.apps.train_belt import rows as belt
from mmsdk.apps.train_stop import trial as stop
from mmsdk.errors import InputError
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.default import WEIGHTS, default_policy
from mmsdk.vla.envs.metaworld import TASKS, MetaWorld, missing
from mmsdk.vla.latency import percentiles
from mmsdk.vla.memory.dual import Ablation
from mmsdk.vla.policy import RobotPolicy

__all__ = ["Robot"]

MT10, LOOP, NAVIGATION = "metaworld-mt10", "loop", "navigation"
SUITES = (MT10, *get_args(belt.Suite), NAVIGATION, LOOP)
DELAYS = (50, 100, 200, 400)
PLAIN = ("default", "blind", "wrong-instruction", "tokens-25")
DELAYED = tuple(f"delay-{ms}-{mode}" for ms in DELAYS for mode in MODES)
COLUMNS = ("suite", "task", "condition", "success", "n", "ci_low", "ci_high", "latency_p50_ms", "latency_p95_ms", "unsafe")
MORE = ("stalled", "wrong", "missed", "oracle", "false_stop", "missed_stop")
_TIMING, _TIMED = "timing", "drawer-open-v3"


@dataclass(frozen=True, slots=True)
class Robot:
    """`suites`, `conditions` and `tasks` are names joined by "+", or "all"; the last two are of MT10.

    metaworld-mt10: `episodes` of each task under each condition, `delayed` of them where answers are late. moving-belt and cue: `belts`
    episodes of each memory; `memories` is a folder of `python -m mmsdk.apps.train_belt`. navigation: `walks`; `walker` is a folder of
    `python -m mmsdk.apps.train_stop`. loop: `ticks` of a simulated arm for each fault, ten times as many for all of them at a time.
    `weights` is another policy's file. `saved` is a file for the rows of parts that are done. Without `timing` no latency of MT10 is told.
    """

    suites: str = "all"
    conditions: str = "all"
    tasks: str = "all"
    episodes: int = 20
    delayed: int = 5
    belts: int = 300
    walks: int = 1000
    ticks: int = 500
    weights: str = ""
    memories: str = ""
    walker: str = ""
    saved: str = ""
    timing: bool = True
    quick: bool = False

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {suite, task, condition, success, n, ci_low, ci_high, latency_p50_ms, latency_p95_ms, unsafe, ...}.

        Intervals are Wilson's at 95 %; latency is what the policy's answers, or the loop's ticks, really took. MT10's success is the
        environment's own flag; an episode that is not done after 300 steps, or in which the hand stands still, has failed; of each
        condition one more row is of all tasks. Of loops, success is the share of ticks at which the robot was not held, and `unsafe` counts
        commands that broke a limit. Columns that a suite does not have are None. With `quick` all sizes are small whatever is said.
        Raises InputError for what is not known, and where a simulation is not installed.
        """
        if self.quick:
            return dataclasses.replace(self, episodes=1, delayed=1, belts=1, walks=1, ticks=20, quick=False)()
        for name in ("episodes", "delayed", "belts", "walks", "ticks"):
            if getattr(self, name) < 1:
                raise InputError(f"it is {getattr(self, name)}, it must be at least 1", item=name)
        parts = self._parts()
        with tqdm(total=len(parts), desc="robot", unit="part", mininterval=2) as bar:

            def measure(part: str) -> Iterator[dict[str, Cell]]:
                if not bar.n:
                    # what a file held takes no time
                    bar.initial = bar.n = parts.index(part)
                bar.set_postfix_str(part)
                yield from self._measured(*part.split(" ", 2))
                bar.update()

            rows = self._rows(parts, measure)
        times, rows = [row for row in rows if row["task"] == _TIMING], [row for row in rows if row["task"] != _TIMING]
        acted = [row for row in rows if row["suite"] == MT10]
        under = dict.fromkeys(row["condition"] for row in acted)
        pooled = [_pooled([row for row in acted if row["condition"] == name]) for name in under]
        return [{name: row.get(name) for name in (*COLUMNS, *MORE)} for row in _clocked([*rows, *pooled], times)]

    def _rows(self, parts: Sequence[str], measure: Callable[[str], Iterator[dict[str, Cell]]]) -> Rows:
        """Of all parts, those that a file holds as they are there."""
        if not self.saved:
            return [row for part in parts for row in measure(part)]
        # a file may be filled part by part, in several calls, and by the same weights alone
        settings = f"{dataclasses.replace(self, suites='all', conditions='all', tasks='all', saved='', timing=True)} {self.versions()}"
        return resumed(Path(self.saved), settings, parts, measure)

    def aims(self, rows: Rows) -> Rows:
        """What was aimed at, and what these rows reach of it."""
        return aims(rows)

    def versions(self) -> dict[str, str]:
        """Which weights acted, by the beginning of their SHA-256."""
        files = [Path(self.weights or WEIGHTS), *self._memories, *self._walker]
        return {path.stem: _digest(path) for path in files if path.is_file()}

    def _parts(self) -> list[str]:
        """Everything that is measured by itself, "suite task condition". What lacks is known now, not in some hours."""
        suites = _chosen(self.suites, SUITES, "suites")
        under = [*PLAIN, *DELAYED] if self.conditions == "all" else self.conditions.split("+")
        for name in under:
            condition(name)
        tasks = _chosen(self.tasks, tuple(TASKS), "tasks")
        if MT10 in suites and missing():
            raise InputError(missing(), item=MT10)
        self._check_trained(suites)
        parts = [f"{MT10} {task} {name}" for name in under for task in tasks] if MT10 in suites else []
        if parts and self.timing:
            parts += dict.fromkeys(f"{MT10} {_TIMING} {_kind(name)}" for name in under)
        parts += [f"{suite} all {name}" for suite in get_args(belt.Suite) if suite in suites for name in get_args(Ablation)]
        parts += [f"{NAVIGATION} all all"] if NAVIGATION in suites else []
        return parts + [f"{LOOP} {control} {fault}" for control in CONTROLS for fault in FAULTS if LOOP in suites]

    def _check_trained(self, suites: Sequence[str]) -> None:
        needed = [(Path(self.weights or WEIGHTS), "train_robot", MT10)]
        needed += [(path, "train_belt", suite) for suite in get_args(belt.Suite) for path in self._memories]
        needed += [(path, "train_stop", NAVIGATION) for path in self._walker]
        for path, program, suite in needed:
            if suite in suites and not path.is_file():
                raise InputError(f"there is no {path}; make it: python -m mmsdk.apps.{program}", item=suite)

    @property
    def _memories(self) -> list[Path]:
        return [Path(self.memories or belt.SHIPPED) / f"{name}.safetensors" for name in ("eyes", *get_args(Ablation))]

    @property
    def _walker(self) -> list[Path]:
        return [Path(self.walker or stop.SHIPPED) / f"{name}.safetensors" for name in ("walker", "verifier")]

    def _measured(self, suite: str, task: str, name: str) -> Iterator[dict[str, Cell]]:
        if task == _TIMING:
            yield self._timed(name)
        elif suite == MT10:
            yield self._played(task, condition(name))
        elif suite == NAVIGATION:
            yield from stop.rows(self.walks, Path(self.walker or stop.SHIPPED))
        elif suite == LOOP:
            yield self._looped(task, name)
        else:
            for row in belt.rows(suite, self.belts, _ablation(name), Path(self.memories or belt.SHIPPED)):
                yield {**row, "stalled": row["unsafe"]}

    def _played(self, task: str, under: Condition) -> dict[str, Cell]:
        """A simulation of its own for each task and condition, so that no result hangs on what was measured before."""
        seeds = range(HELD_OUT, HELD_OUT + (self.delayed if under.delay else self.episodes))
        ended, _ = self._run(task, under, seeds)
        told = _row(MT10, task, under.name, sum(each.success for each in ended), len(ended), [], sum(each.unsafe for each in ended))
        return {**told, "stalled": sum(each.stalled for each in ended)}

    def _timed(self, kind: str) -> dict[str, Cell]:
        """What answers take of a policy that chunks and compresses so: conditions that change nothing else have the same."""
        mode, compress = kind.split(" ")
        ended, took = self._run(_TIMED, Condition(kind, mode=mode, compress=compress), range(HELD_OUT, HELD_OUT + 2))
        return _row(MT10, _TIMING, kind, 0, len(ended), took, 0)

    def _run(self, task: str, under: Condition, seeds: Sequence[int]) -> tuple[list[Ended], list[float]]:
        clock = SimulatedClock()
        with MetaWorld(task, clock) as robot:
            return played(robot, clock, _policy(under.mode, under.compress, self.weights or str(WEIGHTS)), under, seeds)

    def _looped(self, control: str, fault: str) -> dict[str, Cell]:
        (way,), ticks = [each for each in CONTROLS if each == control], self.ticks * (10 if fault == "everything" else 1)
        loop, robot, seconds = broken_run(way, FAULTS[fault], ticks, seed=3 * CONTROLS.index(way))
        moved = ticks - round(loop.report().held_rate * ticks)
        return _row(LOOP, f"arm by {control}", fault, moved, ticks, [1000 * each for each in seconds], len(judge(robot, way)))


@cache
def _policy(mode: str, compress: str, weights: str) -> RobotPolicy:
    """One that chunks and compresses so; its weights are read once for all tasks."""
    return default_policy(chunking=MODES[mode][0], compress=compress, weights=weights)


def _row(suite: str, task: str, name: str, done: int, n: int, took: Sequence[float], unsafe: int) -> dict[str, Cell]:
    (low, high), times = wilson(done, n), percentiles(list(took))
    latency = (times.p50, times.p95) if took else (None, None)
    cells: tuple[Cell, ...] = (suite, task, name, done / n, n, low, high, *latency, unsafe)
    return dict(zip(COLUMNS, cells, strict=True))


def _kind(name: str) -> str:
    """What of a condition its latency hangs on."""
    under = condition(name)
    return f"{under.mode} {under.compress}"


def _clocked(rows: Rows, times: Rows) -> Rows:
    """The rows with the latencies of MT10 in their places."""
    known = {row["condition"]: {name: row[name] for name in COLUMNS if name.startswith("latency")} for row in times}
    return [row | known.get(_kind(str(row["condition"])), {}) if row["suite"] == MT10 else row for row in rows]


def _pooled(rows: Rows) -> dict[str, Cell]:
    """The row of all tasks, or of those that were asked for, under one condition."""
    counts = [int(str(row["n"])) for row in rows]
    done = sum(round(float(str(row["success"])) * n) for row, n in zip(rows, counts, strict=True))
    unsafe, stalled = (sum(int(str(row[key])) for row in rows) for key in ("unsafe", "stalled"))
    about = "all" if len(rows) == len(TASKS) else f"{len(rows)} tasks"
    return {**_row(MT10, about, str(rows[0]["condition"]), done, sum(counts), [], unsafe), "stalled": stalled}


def _ablation(name: str) -> list[Ablation]:
    return [each for each in get_args(Ablation) if each == name]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _chosen(text: str, known: Sequence[str], item: str) -> list[str]:
    """Names out of "a+b", in the order of those that are known. Raises InputError for another."""
    asked = list(known) if text == "all" else text.split("+")
    for name in asked:
        if name not in known:
            raise InputError(f"{name!r} is not known; join some of {', '.join(known)} by +, or write all", item=item)
    return [name for name in known if name in asked]
