"""What /diagnostics is told: how the loop runs, whether its parts are alive, and the worst of it all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mmsdk.errors import InputError
from mmsdk.vla.accounting import LoopReport
from mmsdk.vla.ros.lifecycle import State
from mmsdk.vla.ros.messages import DiagnosticArray, DiagnosticStatus, Header, KeyValue, Level
from mmsdk.vla.ros.stamps import time_of

__all__ = ["Heartbeat", "Tolerance", "array_of", "lifecycle_status", "loop_status", "status", "worst"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Which shares of ticks may be stale, held or changed by the gate before that is a warning; `wrong` times as much is an error."""

    stale: float = 0.01
    held: float = 0.05
    changed: float = 0.2
    wrong: float = 5.0

    def __post_init__(self) -> None:
        if not all(share >= 0 for share in (self.stale, self.held, self.changed)) or not self.wrong >= 1:
            raise InputError(f"{self}: shares are not below 0, wrong is at least 1", item="tolerance")


def status(name: str, level: Level, message: str, values: Mapping[str, object], hardware: str = "") -> DiagnosticStatus:
    """A status; numbers are written with four digits."""
    pairs = [KeyValue(key, f"{value:.4g}" if isinstance(value, float) else str(value)) for key, value in values.items()]
    return DiagnosticStatus(level, name, message, hardware, tuple(pairs))


def loop_status(report: LoopReport, tolerance: Tolerance = Tolerance(), name: str = "control loop", hardware: str = "") -> DiagnosticStatus:
    """How a control loop has run. A policy that raised or was refused is a warning, as are deadlines missed; no ticks are STALE."""
    shares = {"stale": report.stale_rate, "held": report.held_rate, "changed by the gate": report.changed_rate}
    allowed = dict(zip(shares, (tolerance.stale, tolerance.held, tolerance.changed), strict=True))
    counts = {
        "deadline misses": report.deadline_misses,
        "late answers": report.dropped_late,
        "refused chunks": report.refused_chunks,
        "policy errors": report.failed,
    }
    told = [f"{part} {share:.1%} of ticks" for part, share in shares.items() if share > allowed[part]]
    told += [f"{count} {part}" for part, count in counts.items() if count]
    level = Level.WARN if told else Level.OK
    if any(share > allowed[part] * tolerance.wrong for part, share in shares.items()):
        level = Level.ERROR
    if not report.ticks:
        level, told = Level.STALE, ["has not ticked"]
    values: dict[str, object] = {
        "ticks": report.ticks,
        "requests": report.requests,
        **counts,
        "overruns": report.overruns,
        "latency p50 (ms)": report.latency_ms.p50,
        "latency p95 (ms)": report.latency_ms.p95,
        "latency p99 (ms)": report.latency_ms.p99,
        "jitter p99 (ms)": report.jitter_ms.p99,
        **{f"{part} (share)": share for part, share in shares.items()},
        **report.reasons,
    }
    return status(name, level, "; ".join(told) or "runs", values, hardware)


def lifecycle_status(state: State, name: str = "lifecycle") -> DiagnosticStatus:
    """Which state a node is in: only an active one is OK, a finalized one is an ERROR."""
    level = {State.ACTIVE: Level.OK, State.FINALIZED: Level.ERROR}.get(state, Level.WARN)
    return status(name, level, state.name.lower(), {"state": int(state)})


@dataclass(slots=True)
class Heartbeat:
    """Something that is to be heard of at least every `period` seconds: late it is a warning, after three periods it is STALE."""

    name: str
    period: float
    _last: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.period > 0:
            raise InputError(f"a period of {self.period} s, expected more than 0", item=self.name)

    def beat(self, now: float) -> None:
        """It was heard of."""
        self._last = now

    def status(self, now: float) -> DiagnosticStatus:
        """How long it has been silent. A clock that has gone back says nothing of that, and is STALE until the next beat."""
        if self._last is None or now < self._last:
            return status(self.name, Level.STALE, "has not been heard of", {"period (s)": self.period})
        silent = now - self._last
        level = Level.OK if silent <= self.period else Level.WARN if silent <= 3 * self.period else Level.STALE
        return status(self.name, level, "alive" if level == Level.OK else f"silent for {silent:.3f} s", {"period (s)": self.period})


def worst(statuses: Sequence[DiagnosticStatus]) -> Level:
    """The level of the whole: STALE where nothing is fresh, else the worst of those that are; of nothing it is STALE.

    As diagnostic_aggregator has it, part of a thing being STALE is an ERROR of the thing.
    """
    levels = {entry.level for entry in statuses}
    if levels <= {Level.STALE}:
        return Level.STALE
    return Level.ERROR if Level.STALE in levels else max(levels)


def array_of(statuses: Sequence[DiagnosticStatus], now: int) -> DiagnosticArray:
    """A message for /diagnostics, `now` in nanoseconds of ROS time."""
    return DiagnosticArray(Header(time_of(now)), tuple(statuses))
