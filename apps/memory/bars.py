"""A panel of bars for a suite that is measured at one budget: a bar for each policy, the best first, and its 95 % interval."""

from collections.abc import Mapping, Sequence
from html import escape

from mmsdk.apps.console import Cell
from mmsdk.apps.memory.rows import GOING

__all__ = ["barred"]

_NAMES, _ROW = 112, 13


def barred(title: str, rows: Sequence[Mapping[str, Cell]], colours: Mapping[str, str], size: tuple[int, int]) -> str:
    """The bars of rows with a quality from 0 to 1, in a panel of this size, the full cache's as a dashed line; names stand at the left."""
    width, height = size
    thick = min(_ROW, height / max(1, len(rows)))

    def at(share: float) -> float:
        return _NAMES + share * (width - _NAMES)

    parts = [f'<text class="t" x="0" y="-12">{escape(title)}</text>', f'<path class="a" d="M{_NAMES} 0V{height}H{width}"/>']
    for share in (0.0, 0.5, 1.0):
        parts.append(f'<text x="{at(share):.1f}" y="{height + 17}" text-anchor="middle">{100 * share:.0f} %</text>')
    for place, row in enumerate(sorted(rows, key=lambda row: -_share(row["quality"]))):
        y, policy = (place + 0.5) * thick, str(row["policy"]).removesuffix(GOING)
        parts.append(f'<text x="{_NAMES - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(policy)}</text>')
        colour = colours.get(policy, "#888")
        parts.append(f'<path stroke="{colour}" stroke-width="{0.7 * thick:.1f}" d="M{_NAMES} {y:.1f}H{at(_share(row["quality"])):.1f}"/>')
        if isinstance(row.get("ci_low"), int | float) and isinstance(row.get("ci_high"), int | float):
            parts.append(f'<path class="a" d="M{at(_share(row["ci_low"])):.1f} {y:.1f}H{at(_share(row["ci_high"])):.1f}"/>')
    full = at(max(_share(row["quality_full"]) for row in rows))
    parts.append(f'<path class="a" stroke-dasharray="5 4" d="M{full:.1f} 0V{height}"/>')
    return "".join(parts)


def _share(cell: Cell) -> float:
    assert isinstance(cell, int | float), "rows without numbers were left out"
    return float(cell)
