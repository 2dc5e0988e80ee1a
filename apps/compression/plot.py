"""Accuracy against the tokens kept and against the time of an answer, for pictures and for clips, as an SVG for light and dark pages."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from mmsdk.apps.console import Cell
from mmsdk.apps.memory.plot import COLOURS, STYLE, curve, legend

__all__ = ["drawn"]

_PANEL, _GAP, _LEFT, _TOP, _KEY = (300, 200), 62, 58, 40, 18
# What every other method has to beat is drawn in grey.
_FLOORS = {"random": "#9a9a9a", "uniform": "#6e6e6e"}
_TICKS = (1, 2, 5)

Row = Mapping[str, Cell]
Point = tuple[float, float]


def drawn(rows: Sequence[Row], batch: int = 4) -> str:
    """The picture of a result of the bench; rows without an accuracy, and of other batches, are left out."""
    shown = [row for row in rows if row["accuracy"] is not None and row["batch"] == batch]
    media = list(dict.fromkeys(str(row["media"]) for row in shown))
    names = [name for name in dict.fromkeys(str(row["method"]) for row in shown) if name != "identity"]
    colours = dict(zip((name for name in names if name not in _FLOORS), _cycled(len(names)), strict=False)) | {
        name: grey for name, grey in _FLOORS.items() if name in names
    }
    width, height = _LEFT + 2 * (_PANEL[0] + _GAP), _TOP + len(media) * (_PANEL[1] + _GAP) + _KEY * -(-len(colours) // 4) + 12
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">']
    parts.append(f"<style>{STYLE}</style>")
    axes: list[tuple[str, Callable[[Row], float]]] = [("% of tokens", _share), (f"ms an answer, {batch} at a time", _milliseconds)]
    for line, name in enumerate(media):
        here = [row for row in shown if row["media"] == name]
        for column, (told, of) in enumerate(axes):
            x, y = _LEFT + column * (_PANEL[0] + _GAP), _TOP + line * (_PANEL[1] + _GAP)
            panel = _panel(f"{name}: share of right answers, {told}", here, of, colours)
            parts.append(f'<g transform="translate({x},{y})">{panel}</g>')
    parts.append(legend(colours, height - _KEY * -(-len(colours) // 4), width))
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, rows: Sequence[Row], of: Callable[[Row], float], colours: Mapping[str, str]) -> str:
    """Axes, the uncompressed model as a dashed line, and a line for each method; the horizontal axis is logarithmic."""
    width, height = _PANEL
    low, high = min(map(of, rows)), max(map(of, rows))

    def across(value: float) -> float:
        return 8 + (width - 16) * math.log(value / low) / math.log(high / low) if high > low else width / 2

    def at(row: Row) -> Point:
        return across(of(row)), height * (1 - _number(row["accuracy"]))

    parts = [f'<text class="t" x="0" y="-12">{escape(title)}</text>', f'<path class="a" d="M0 0V{height}H{width}"/>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = height * (1 - share)
        parts.append(f'<path class="g" d="M0 {y:.1f}H{width}"/><text x="-6" y="{y + 4:.1f}" text-anchor="end">{share:g}</text>')
    parts += [f'<text x="{across(tick):.1f}" y="{height + 17}" text-anchor="middle">{tick:g}</text>' for tick in _ticks(low, high)]
    full = height * (1 - max(_number(row["accuracy_full"]) for row in rows))
    parts.append(f'<path class="a" stroke-dasharray="5 4" d="M0 {full:.1f}H{width}"/>')
    for name, colour in colours.items():
        mine = sorted((row for row in rows if row["method"] == name), key=_share)
        parts.append(curve([at(row) for row in mine], colour, thick=name in _FLOORS))
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers within a range: 1, 2 and 5 times the powers of ten."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for power in powers for first in _TICKS if low <= (tick := first * 10.0**power) <= high]


def _share(row: Row) -> float:
    return 100 * _number(row["retention"])


def _milliseconds(row: Row) -> float:
    return sum(_number(row[f"{stage}_ms"]) for stage in ("encode", "compress", "prefill", "decode")) / _number(row["batch"])


def _cycled(count: int) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(count)]


def _number(cell: Cell) -> float:
    assert isinstance(cell, int | float), "rows without numbers were left out"
    return float(cell)
