"""Plain tables for a terminal."""

from collections.abc import Mapping, Sequence

__all__ = ["Cell", "table"]

Cell = str | int | float | bool | None


def table(rows: Sequence[Mapping[str, Cell]]) -> str:
    """Rows under one line of column names; columns in order of first appearance, numbers to the right."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *[[_text(row.get(name)) for name in columns] for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    numeric = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in columns]
    drawn = ["  ".join(map(_pad, line, widths, numeric)).rstrip() for line in lines]
    return "\n".join(drawn)


def _pad(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return f"{cell:.3g}" if isinstance(cell, float) and abs(cell) < 100 else f"{cell:.0f}" if isinstance(cell, float) else str(cell)
