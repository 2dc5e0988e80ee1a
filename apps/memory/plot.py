"""Quality against budget, a panel for every suite, as an SVG that is read on light and dark pages.

A suite that is measured at one budget has bars instead, and so have streams that go on, at their end.
"""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import islice

from mmsdk.apps.console import Cell
from mmsdk.apps.memory.bars import barred
from mmsdk.apps.memory.rows import GOING

__all__ = ["COLOURS", "STYLE", "curve", "drawn", "legend"]

_PANEL, _GAP, _LEFT, _TOP, _KEY = (250, 190), 54, 58, 44, 18
COLOURS = "#4269d0 #efb118 #ff725c #6cc5b0 #3ca951 #ff8ab7 #a463f2 #97bbf5 #9c6b4e #e15759 #2f8f9d #b07aa1 #d4a373 #7f8fa6 #c23b8f".split()
STYLE = (
    "text{font:12px sans-serif;fill:#333}.t{font-weight:bold}.a{stroke:#888;fill:none}.g{stroke:#8884;fill:none}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)

Point = tuple[float, float]


def drawn(rows: Sequence[Mapping[str, Cell]]) -> str:
    """The picture of a result of the bench; rows without a budget, a quality or the full cache's beside it are left out."""
    names = ("budget", "quality", "quality_full")
    known = [row for row in rows if all(isinstance(row[name], float) for name in names) and _number(row["budget"]) < 1]
    lasting = [row for row in known if str(row["policy"]).endswith(GOING)]
    shown = [row for row in known if row not in lasting]
    suites = list(dict.fromkeys(str(row["suite"]) for row in shown))
    policies = list(dict.fromkeys(str(row["policy"]) for row in shown))
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(policies)}
    panels = [_panel(suite, [row for row in shown if row["suite"] == suite], colours) for suite in suites]
    if lasting:
        frames = max(_number(row["frames"]) for row in lasting)
        panels.append(barred(f"stream of {frames:,.0f} frames", [row for row in lasting if row["frames"] == frames], colours, _PANEL))
    columns = min(2, max(1, len(panels)))
    lines = -(-len(panels) // columns)
    width = _LEFT + columns * (_PANEL[0] + _GAP)
    height = _TOP + lines * (_PANEL[1] + _GAP + 22) + _KEY * -(-len(policies) // 4) + 12
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">']
    parts.append(f"<style>{STYLE}</style>")
    for place, panel in enumerate(panels):
        x, y = _LEFT + place % columns * (_PANEL[0] + _GAP), _TOP + place // columns * (_PANEL[1] + _GAP + 22)
        parts.append(f'<g transform="translate({x},{y})">{panel}</g>')
    parts.append(legend(colours, height - _KEY * -(-len(policies) // 4), width))
    return "\n".join([*parts, "</svg>", ""])


def _panel(suite: str, rows: Sequence[Mapping[str, Cell]], colours: Mapping[str, str]) -> str:
    """Axes, the full cache as a dashed line, and a line for each policy; budgets from large to small, at even steps."""
    width, height = _PANEL
    budgets = sorted({_number(row["budget"]) for row in rows}, reverse=True)
    if len(budgets) == 1:
        return barred(f"{suite}, {100 * budgets[0]:g} % of the tokens", rows, colours, _PANEL)
    top = max(_number(row[name]) for row in rows for name in ("quality", "quality_full")) or 1.0

    def at(row: Mapping[str, Cell]) -> Point:
        place = budgets.index(_number(row["budget"])) / max(1, len(budgets) - 1)
        return 10 + place * (width - 20), height * (1 - _number(row["quality"]) / top)

    parts = [f'<text class="t" x="0" y="-12">{escape(suite)}</text>', f'<path class="a" d="M0 0V{height}H{width}"/>']
    for share in (0.0, 0.5, 1.0):
        y = height * (1 - share)
        parts.append(f'<path class="g" d="M0 {y:.1f}H{width}"/><text x="-6" y="{y + 4:.1f}" text-anchor="end">{top * share:.2g}</text>')
    for place, budget in enumerate(budgets):
        x = 10 + place / max(1, len(budgets) - 1) * (width - 20)
        parts.append(f'<text x="{x:.1f}" y="{height + 17}" text-anchor="middle">{100 * budget:g} %</text>')
    full = height * (1 - max(_number(row["quality_full"]) for row in rows) / top)
    parts.append(f'<path class="a" stroke-dasharray="5 4" d="M0 {full:.1f}H{width}"/>')
    for name, colour in colours.items():
        points = [at(row) for row in sorted(rows, key=lambda row: -_number(row["budget"])) if row["policy"] == name]
        parts.append(curve(points, colour, thick=name in ("window", "streaming")))
    return "".join(parts)


def curve(points: Sequence[Point], colour: str, thick: bool) -> str:
    """A line with a dot at every point."""
    if not points:
        return ""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points)
    return f'<path fill="none" stroke="{colour}" stroke-width="{3 if thick else 1.6}" d="M{path}"/>{dots}'


def legend(colours: Mapping[str, str], y: int, width: int) -> str:
    """Names in their colours, four in a line, from the height y on."""
    names, parts = iter(colours.items()), list[str]()
    step = (width - 20) // 4
    while line := list(islice(names, 4)):
        for place, (name, colour) in enumerate(line):
            x = 20 + place * step
            parts.append(f'<path stroke="{colour}" stroke-width="3" d="M{x} {y - 4}h18"/><text x="{x + 24}" y="{y}">{escape(name)}</text>')
        y += _KEY
    return "".join(parts)


def _number(cell: Cell) -> float:
    assert isinstance(cell, int | float), "rows without numbers were left out"
    return float(cell)
