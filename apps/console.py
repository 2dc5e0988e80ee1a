"""What programs show: plain tables, in a terminal no wider than it is, and a word while a person waits.

Anywhere else than in a terminal a row is a line, for programs to read, and nobody waits.
"""

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest

__all__ = ["Cell", "busy", "table", "terminal_width"]

Cell = str | int | float | bool | None
GAP = "  "
NARROWEST = 12  # characters that a wrapped column keeps


@contextmanager
def busy(text: str) -> Iterator[None]:
    """Say on stderr what takes a while, for as long as it does; nothing where stderr is no terminal."""
    line = f"{text} ..." if sys.stderr is not None and sys.stderr.isatty() else ""
    print(end=line, file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(end=f"\r{' ' * len(line)}\r" if line else "", file=sys.stderr, flush=True)


def terminal_width() -> int | None:
    """Characters in a line of the terminal, None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


def table(rows: Sequence[Mapping[str, Cell]], width: int | None = None) -> str:
    """Rows under one line of column names; columns in order of first appearance, numbers to the right.

    Where the lines would be longer than `width` characters, the widest columns are wrapped.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *[[_text(row.get(name)) for name in columns] for row in rows]]
    widths = _fitted([max(len(line[i]) for line in lines) for i in range(len(columns))], width)
    numeric = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in columns]
    drawn = [GAP.join(map(_pad, part, widths, numeric)).rstrip() for line in lines for part in _wrapped(line, widths)]
    return "\n".join(drawn)


def _fitted(widths: list[int], width: int | None) -> list[int]:
    """Column widths with the widest made narrower, one character at a time, until a line fits or nothing more can be taken."""
    fitted = list(widths)
    room = sum(widths) if width is None else width - len(GAP) * (len(widths) - 1)
    while sum(fitted) > room and max(fitted) > NARROWEST:
        fitted[fitted.index(max(fitted))] -= 1
    return fitted


def _wrapped(line: Sequence[str], widths: Sequence[int]) -> list[tuple[str, ...]]:
    """The lines that one row takes; cells that fit stand in the first of them as they are."""
    cells = [[cell] if len(cell) <= width else textwrap.wrap(cell, width) for cell, width in zip(line, widths, strict=True)]
    return list(zip_longest(*cells, fillvalue=""))


def _pad(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return f"{cell:.3g}" if isinstance(cell, float) and abs(cell) < 100 else f"{cell:.0f}" if isinstance(cell, float) else str(cell)
