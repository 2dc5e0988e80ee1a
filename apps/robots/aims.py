"""What robot policies were to reach in simulation, beside what the rows of the bench say: met or not, each with its numbers."""

from collections.abc import Callable, Iterator, Sequence

from mmsdk.apps.console import Cell

__all__ = ["aims"]

Row = dict[str, Cell]
_DONE = 0.8
_BELTS = {"moving-belt": "what comes by is picked", "cue": "what was shown is picked"}


def aims(rows: Sequence[Row]) -> list[Row]:
    """Rows {aim, wanted, reached, met} of all aims that these rows can be held to."""
    judged: tuple[Callable[[Sequence[Row]], Iterator[Row]], ...] = (_policy, _controls, _memories, _stops, _safe)
    return [aim for judge in judged for aim in judge(rows)]


def _policy(rows: Sequence[Row]) -> Iterator[Row]:
    for row in _of(rows, "metaworld-mt10", "default", "all"):
        yield _aim("the default policy on MT10", f"{_DONE:.0%} of held-out episodes done", _told(row), _share(row) >= _DONE)


def _controls(rows: Sequence[Row]) -> Iterator[Row]:
    """Who sees nothing, or is told something else, is to do less."""
    for mine in _of(rows, "metaworld-mt10", "default", "all"):
        for name in ("blind", "wrong-instruction"):
            for row in _of(rows, "metaworld-mt10", name, "all"):
                yield _aim(
                    f"the control {name} on MT10", "far below the default", f"{_told(row)}; default {_told(mine)}", _apart(mine, row)
                )


def _memories(rows: Sequence[Row]) -> Iterator[Row]:
    for suite, about in _BELTS.items():
        for dual in _of(rows, suite, "dual"):
            others = [row for name in ("none", "slow", "fast") for row in _of(rows, suite, name)]
            if others:
                told = ", ".join(f"{row['condition']} {_told(row)}" for row in (dual, *others))
                met = all(_apart(dual, row) for row in others)
                yield _aim(f"dual memory, {about}", "ahead of every ablation, intervals apart", told, met)


def _stops(rows: Sequence[Row]) -> Iterator[Row]:
    for alone in _of(rows, "navigation", "backbone"):
        for row in _of(rows, "navigation", "verified"):
            told = f"{_told(row)}, stopped wrongly {_number(row['false_stop']):.1%}; "
            told += f"the backbone alone {_told(alone)}, {_number(alone['false_stop']):.1%}"
            yield _aim("verified stops", "ahead of the backbone's own, intervals apart", told, _apart(row, alone))


def _safe(rows: Sequence[Row]) -> Iterator[Row]:
    looped = [row for row in rows if row["suite"] == "loop"]
    if looped:
        ticks, unsafe = (sum(int(_number(row[key])) for row in looped) for key in ("n", "unsafe"))
        yield _aim("the loop under faults", "10,000 ticks, no unsafe command", f"{ticks:,} ticks, {unsafe}", ticks >= 10_000 and not unsafe)


def _of(rows: Sequence[Row], suite: str, condition: str, task: str = "") -> list[Row]:
    return [row for row in rows if (row["suite"], row["condition"]) == (suite, condition) and task in ("", row["task"])]


def _apart(above: Row, below: Row) -> bool:
    """Whether the whole of one interval is above the other."""
    return _number(above["ci_low"]) > _number(below["ci_high"])


def _told(row: Row) -> str:
    low, high = _number(row["ci_low"]), _number(row["ci_high"])
    return f"{_share(row):.1%} ({low:.0%} to {high:.0%}) of {row['n']}"


def _share(row: Row) -> float:
    return _number(row["success"])


def _number(cell: Cell) -> float:
    assert isinstance(cell, int | float), "a number is told"
    return float(cell)


def _aim(aim: str, wanted: str, reached: str, met: bool) -> Row:
    return {"aim": aim, "wanted": wanted, "reached": reached, "met": "yes" if met else "no"}
