"""The tables by which a memory is chosen: of the kept result of its bench, one a suite, with a line for each policy."""

from collections.abc import Mapping, Sequence
from typing import Any

from pages import kept_result, table, where
from sources import ROOT

__all__ = ["memory_tables"]

DRAWING = "images/memory.svg"
BUDGETS = (0.5, 0.25, 0.1, 0.05, 0.025)
TITLES = {
    "text": "Long text: how likely the words that follow are (geometric mean of their probabilities)",
    "needle": "Needles: the right digits of a number hidden in a long text",
    "clip": "Long clips: right answers to questions about them",
}
# Behind the name of a policy in a result, as `mmsdk.apps.memory.rows` writes it: this row is of a stream that goes on for long.
GOING = ", going on"


def memory_tables() -> str:
    """Quality as a share of the full cache's at every budget, and, at a tenth, bytes held and read and speed beside it."""
    result = kept_result("memory")
    if result is None:
        return "No result of `mmsdk bench memory` is kept yet."
    rows: Sequence[Mapping[str, Any]] = [row for row in result["rows"] if row["quality"] is not None]
    parts = [where(result)]
    for suite, title in TITLES.items():
        here = [row for row in rows if row["suite"] == suite]
        if here:
            (full,) = (row for row in here if row["policy"] == "full")
            names = dict.fromkeys(row["policy"] for row in here if row["quality_full"] is not None and row["policy"] != "full")
            lines = [_line(name, full, [row for row in here if row["policy"] == name]) for name in names]
            parts.append(f"**{title}.** Everything held: {full['quality']:.3g}. The share of that:\n\n{table(lines)}")
            parts += [_between(row, full) for row in here if row["policy"] in names and row["budget"] not in BUDGETS]
            parts += _compacted([row for row in here if row["quality_full"] is None])
    parts += _streams([row for row in rows if row["suite"] == "stream"])
    if (ROOT / "docs" / DRAWING).is_file():
        parts.append(f"![Quality against what is held or read, for each suite]({DRAWING})")
    return "\n\n".join(parts)


def _between(row: Mapping[str, Any], full: Mapping[str, Any]) -> str:
    """A policy at a budget of its own, that of which its paper speaks."""
    read = 100 * row["bytes_read_per_token"] / max(full["bytes_read_per_token"], 1)
    return f"`{row['policy']}` at {100 * row['budget']:g} %: {_share(row, full)}, for {read:.0f} % of what everything takes to read."


def _compacted(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ways to go on through a small window, which are measured on other tokens."""
    told = ", ".join(f"`{row['policy']}` {row['quality']:.3g} at {row['tok_s']:.0f} tokens a second" for row in rows)
    return [f"A text that is compacted over and over, in a window of {100 * rows[0]['budget']:.0f} % of it: {told}."] if rows else []


def _streams(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of short streams a line for each memory, of those that go on one for each time at which they were asked."""
    # results from before answers were counted say nothing here
    rows = [row for row in rows if row.get("n")]
    short = [row for row in rows if not row["policy"].endswith(GOING)]
    going = [row for row in rows if row["policy"].endswith(GOING)]
    parts = []
    if short:
        (full,) = (row for row in short if row["policy"] == "full")
        told = f"{full['n']} questions; everything held ({full['bytes_held'] / 1e6:.2f} MB): {_right(full)}"
        lines = [{"policy": f"`{row['policy']}`"} | _counted(row) for row in short if row is not full]
        parts.append(f"**Streams of {full['frames']} frames: right answers about their beginning.** {told}.\n\n{table(lines)}")
    if going:
        shown = f"{going[0]['n']} questions; everything held, right after what they ask about: {100 * going[0]['quality_full']:.0f} %"
        lines = [_later(row) for row in going]
        parts.append(f"**Streams that go on: right answers about their beginning.** {shown}.\n\n{table(lines)}")
    return parts


def _later(row: Mapping[str, Any]) -> dict[str, str]:
    line = {"policy": f"`{row['policy'].removesuffix(GOING)}`", "frames": f"{row['frames']:,}"} | _counted(row)
    return line | {"tokens a second": f"{row['tok_s']:.0f}"}


def _counted(row: Mapping[str, Any]) -> dict[str, str]:
    beside = "" if row["p"] is None else f"{row['better']} more, {row['worse']} fewer than `{row['against']}` (p = {row['p']:.2g})"
    return {"right (95 % interval)": _right(row), "question by question": beside, "held, MB": f"{row['bytes_held'] / 1e6:.2f}"}


def _right(row: Mapping[str, Any]) -> str:
    return f"{100 * row['quality']:.0f} % ({100 * row['ci_low']:.0f} to {100 * row['ci_high']:.0f})"


def _line(name: str, full: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A policy at all budgets; bytes and speed are those at a tenth, beside the full cache's."""
    known = {row["budget"]: row for row in rows}
    line = {"policy": f"`{name}`"}
    line |= {f"{100 * share:g} %": _share(known[share], full) if share in known else "" for share in BUDGETS}
    at = known.get(0.1)
    if at is None:
        return line | {"held": "", "read": "", "speed": ""}
    shares = {"held": "bytes_held", "read": "bytes_read_per_token"}
    line |= {told: f"{100 * at[name] / max(full[name], 1):.0f} %" for told, name in shares.items()}
    return line | {"speed": f"{at['tok_s'] / full['tok_s']:.2f}"}


def _share(row: Mapping[str, Any], full: Mapping[str, Any]) -> str:
    return f"{100 * row['quality'] / max(full['quality'], 1e-9):.0f} %"
