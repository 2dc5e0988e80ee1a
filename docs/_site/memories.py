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
    "stream": "Streams: right answers about their beginning",
}


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
    if (ROOT / "docs" / DRAWING).is_file():
        parts.append(f"![Quality against what is held or read, for each suite]({DRAWING})")
    return "\n\n".join(parts)


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
