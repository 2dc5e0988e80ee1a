"""What programs show: plain tables, no wider than can be read, and a word while a person waits at a terminal.

Tables are for people, wherever they read them; programs are given JSON.
"""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TypeVar

__all__ = ["Cell", "busy", "counted", "line_width", "table"]

Cell = str | int | float | bool | None
T = TypeVar("T")
GAP = "  "
NARROWEST = 12  # characters that a wrapped column keeps
BAR = 24  # characters of a bar
READABLE = 120  # characters of a line where there is no terminal that says how many it has


@contextmanager
def busy(text: str) -> Iterator[None]:
    """Say on stderr what takes a while, for as long as it does; nothing where stderr is no terminal."""
    line = f"{text} ..." if sys.stderr is not None and sys.stderr.isatty() else ""
    print(end=line, file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(end=f"\r{' ' * len(line)}\r" if line else "", file=sys.stderr, flush=True)


def counted(text: str, items: Sequence[T]) -> Iterator[T]:
    """Go through them, and say so with a bar that grows, where stderr is a terminal."""
    for number, item in enumerate(items):
        done = BAR * number // len(items)
        with busy(f"{text} [{'#' * done}{'.' * (BAR - done)}] {number}/{len(items)}"):
            yield item


def line_width() -> int:
    """Characters in a line: what COLUMNS says, else what the terminal has, else 120, as in a pipe or a file."""
    return shutil.get_terminal_size((READABLE, 0)).columns


def table(rows: Sequence[Mapping[str, Cell]], width: int | None = None) -> str:
    """Rows under one line of column names; columns in order of first appearance, numbers to the right.

    Where the lines would be longer than `width` characters, the widest columns are wrapped, within a word (a path) only where nothing else
    would do. Nothing is left out, and no name of a column is broken within a word: where that does not fit, lines are longer.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[_text(row.get(name)) for name in columns] for row in rows]
    widths = _fitted([[name, *(line[i] for line in lines)] for i, name in enumerate(columns)], width)
    numeric = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in columns]
    head = zip_longest(*map(_broken, columns, widths), fillvalue="")
    parts = [*head, *(part for line in lines for part in _wrapped(line, widths))]
    return "\n".join(GAP.join(map(_pad, part, widths, numeric)).rstrip() for part in parts)


def _fitted(columns: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Column widths with the widest made narrower, one character at a time, until a line fits or nothing more can be taken.

    First no column becomes narrower than its longest word, then none narrower than NARROWEST, or than all that stands in it. The first
    cell is the column's name, which is broken behind spaces and underscores and nowhere else.
    """
    fitted = [max(map(len, cells)) for cells in columns]
    room = sum(fitted) if width is None else width - len(GAP) * (len(fitted) - 1)
    names = [max(map(len, cells[0].replace("_", "_ ").split()), default=0) for cells in columns]
    words = [max((len(word) for cell in cells[1:] for word in cell.split()), default=0) for cells in columns]
    wholes = [max(map(len, cells[1:]), default=0) for cells in columns]
    for least in (words, [0] * len(columns)):
        floors = [max(name, low, min(NARROWEST, whole)) for name, low, whole in zip(names, least, wholes, strict=True)]
        while sum(fitted) > room:
            spare = [wide if wide > floor else 0 for wide, floor in zip(fitted, floors, strict=True)]
            if not any(spare):
                break
            fitted[spare.index(max(spare))] -= 1
    return fitted


def _wrapped(line: Sequence[str], widths: Sequence[int]) -> list[tuple[str, ...]]:
    """The lines that one row takes; cells that fit stand in the first of them as they are."""
    cells = [
        [cell] if len(cell) <= width else textwrap.wrap(cell, width, break_on_hyphens=False)
        for cell, width in zip(line, widths, strict=True)
    ]
    return list(zip_longest(*cells, fillvalue=""))


def _broken(name: str, width: int) -> list[str]:
    """The lines that the name of a column takes: it is broken behind spaces and underscores, and nowhere else."""
    lines = [""]
    for part in re.findall(r"[^_ ]*_|[^_ ]+ ?| ", name):
        if lines[-1] and len(f"{lines[-1]}{part}".rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def _pad(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.3g}" if abs(cell) < 10 else f"{cell:.2f}" if abs(cell) < 100 else f"{cell:.0f}"
