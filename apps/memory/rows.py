"""Rows of the bench of memories: all have the same fields, those that a suite has nothing to say about empty."""

from collections.abc import Mapping, Sequence

from mmsdk.apps.console import Cell
from mmsdk.apps.intervals import sign_test, wilson

__all__ = ["GOING", "Right", "row", "share", "told"]

GOING = ", going on"
"""What stands behind the name of a policy that holds a stream for long."""

Right = Sequence[bool]
"""Which of the answers are right."""


def row(
    suite: str, policy: str, budget: float, quality: tuple[float | None, float | None], held: int | float, read: int | float, speed: float,
    frames: int | None = None, counted: Mapping[str, Cell] | None = None,
) -> dict[str, Cell]:  # fmt: skip
    """`quality` is that of the policy and of the full cache; `counted` is what `told` says of answers."""
    return {
        "suite": suite, "policy": policy, "budget": budget, "quality": quality[0], "quality_full": quality[1], "bytes_held": int(held),
        "bytes_read_per_token": int(read), "tok_s": speed, "frames": frames, **(told() if counted is None else counted),
    }  # fmt: skip


def share(right: Right) -> float:
    """Of one answer or more, how many are right."""
    return sum(right) / len(right)


def told(right: Right | None = None, windows: Mapping[str, Right] | None = None) -> dict[str, Cell]:
    """How many answers a share is of and its 95 % interval, and, question by question, what it is beside the best of some windows.

    `better` are the questions answered right here and wrong there, `worse` the others that differ; `p` is the sign test's.
    """
    cells: dict[str, Cell] = dict.fromkeys(("n", "ci_low", "ci_high", "against", "better", "worse", "p"))
    if right is None:
        return cells
    low, high = wilson(sum(right), len(right))
    cells |= {"n": len(right), "ci_low": low, "ci_high": high}
    if windows:
        against, theirs = max(windows.items(), key=lambda item: sum(item[1]))
        pairs = list(zip(right, theirs, strict=True))
        better, worse = sum(one and not other for one, other in pairs), sum(other and not one for one, other in pairs)
        cells |= {"against": against, "better": better, "worse": worse, "p": sign_test(better, worse)}
    return cells
