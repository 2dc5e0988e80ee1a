"""What a loop did, counted: latencies and jitter as percentiles, missed deadlines, stale and held ticks, changed commands, jerk."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

from mmsdk.vla.latency import Percentiles, percentiles

__all__ = ["Account", "LoopReport"]

_KEPT = 100_000


@dataclass(frozen=True, slots=True)
class LoopReport:
    """Times in milliseconds, warm-up excluded; rates are shares of all ticks. `reasons` counts why ticks were held and answers dropped.

    `latency_ms` is from request to accepted answer, `jitter_ms` how much later than planned ticks began, `busy_ms` how long they took.
    `jerk_peak` and `jerk_rms` are of the commanded motion of all axes, in the contract's units per s^3.
    """

    ticks: int
    latency_ms: Percentiles
    jitter_ms: Percentiles
    busy_ms: Percentiles
    cold_start_ms: float
    requests: int
    deadline_misses: int
    dropped_late: int
    refused_chunks: int
    failed: int
    overruns: int
    stale_rate: float
    held_rate: float
    changed_rate: float
    jerk_peak: float
    jerk_rms: float
    reasons: dict[str, int]

    def __str__(self) -> str:
        lines = [
            f"{self.ticks} ticks, {self.requests} requests; first answer after {self.cold_start_ms:.0f} ms (not counted below)",
            *(_line(name, times) for name, times in (("latency", self.latency_ms), ("jitter", self.jitter_ms), ("busy", self.busy_ms))),
            f"deadline misses {self.deadline_misses}, late answers dropped {self.dropped_late}, chunks refused {self.refused_chunks}, "
            f"policy errors {self.failed}, overruns {self.overruns}",
            f"stale {self.stale_rate:.1%}, held {self.held_rate:.1%}, changed by the gate {self.changed_rate:.1%} of ticks",
            f"jerk peak {self.jerk_peak:.4g}, rms {self.jerk_rms:.4g}",
            *(f"  {count} x {reason}" for reason, count in self.reasons.items()),
        ]
        return "\n".join(lines)


@dataclass(slots=True)
class Account:
    """The running sums behind a `LoopReport`. Of measurements the last 100,000 are kept."""

    latency: "deque[float]" = field(default_factory=lambda: deque(maxlen=_KEPT))
    jitter: "deque[float]" = field(default_factory=lambda: deque(maxlen=_KEPT))
    busy: "deque[float]" = field(default_factory=lambda: deque(maxlen=_KEPT))
    reasons: "Counter[str]" = field(default_factory=Counter)
    cold_start: float = 0.0
    ticks: int = 0
    requests: int = 0
    misses: int = 0
    late: int = 0
    refused: int = 0
    failed: int = 0
    overruns: int = 0
    stale: int = 0
    held: int = 0
    changed: int = 0
    jerk_peak: float = 0.0
    jerk_square: float = 0.0
    jerks: int = 0

    def moved(self, jerks: Sequence[float]) -> None:
        """The jerk of every axis at one tick."""
        self.jerk_peak = max(self.jerk_peak, *map(abs, jerks))
        self.jerk_square += sum(jerk * jerk for jerk in jerks)
        self.jerks += len(jerks)

    def report(self) -> LoopReport:
        """The sums as they stand."""
        ticks = max(1, self.ticks)
        return LoopReport(
            ticks=self.ticks,
            latency_ms=percentiles([1000 * value for value in self.latency]),
            jitter_ms=percentiles([1000 * value for value in self.jitter]),
            busy_ms=percentiles([1000 * value for value in self.busy]),
            cold_start_ms=1000 * self.cold_start,
            requests=self.requests,
            deadline_misses=self.misses,
            dropped_late=self.late,
            refused_chunks=self.refused,
            failed=self.failed,
            overruns=self.overruns,
            stale_rate=self.stale / ticks,
            held_rate=self.held / ticks,
            changed_rate=self.changed / ticks,
            jerk_peak=self.jerk_peak,
            jerk_rms=sqrt(self.jerk_square / max(1, self.jerks)),
            reasons=dict(self.reasons.most_common()),
        )


def _line(name: str, times: Percentiles) -> str:
    return f"{name:8} p50 {times.p50:8.2f}  p95 {times.p95:8.2f}  p99 {times.p99:8.2f}  largest {times.largest:8.2f} ms  ({times.count})"
