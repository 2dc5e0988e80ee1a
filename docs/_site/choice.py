"""The tables of compression, of the kept result of its bench: by which a method is chosen, what was aimed at, and the README's."""

from collections.abc import Mapping, Sequence
from typing import Any

from pages import kept_result, table, where
from sources import ROOT

__all__ = ["aims_table", "choice_table", "readme_table"]

DRAWING = "images/compression.svg"
NOTHING = "No result of `mmsdk bench compress` is kept yet."
SHOWN = ((0.25, "25 %"), (0.1, "10 %"), (0.01, "1 %"))


def choice_table() -> str:
    """For pictures and for clips the share of the uncompressed model's right answers at some budgets, and what an answer's time becomes."""
    result = kept_result("compress")
    if result is None:
        return NOTHING
    rows: Sequence[Mapping[str, Any]] = [row for row in result["rows"] if row["accuracy"] is not None and row["batch"] == 4]
    parts = [where(result)]
    for media, title in (("image", "Pictures"), ("clip", "Clips of 8 frames")):
        here = [row for row in rows if row["media"] == media]
        (full,) = (row for row in here if row["method"] == "identity")
        head = f"**{title}.** {full['n']} questions; the uncompressed model answers {full['accuracy']:.0%} rightly. The share of that:"
        names = dict.fromkeys(row["method"] for row in here if row["method"] != "identity")
        parts.append(f"{head}\n\n{table([_line(name, here) for name in names])}")
    if (ROOT / "docs" / DRAWING).is_file():
        parts.append(f"![Right answers against tokens and against time, of pictures and of clips]({DRAWING})")
    ends = [row for row in result["rows"] if row["media"].startswith("clip of")]
    if ends:
        told = ", ".join(f"{row['speedup']:.2f} times with `{row['method']}`" for row in ends if row["method"] != "identity")
        parts.append(f"From pixels to an answer of 16 tokens, {ends[0]['media']}, four at a time, a tenth of the tokens: as fast {told}.")
    return "\n\n".join(parts)


def aims_table() -> str:
    """What was aimed at, what was reached, and whether that is enough."""
    result = kept_result("compress")
    if result is None:
        return NOTHING
    return f"{where(result)}\n\n{table([{name: str(cell) for name, cell in aim.items()} for aim in result['aims']])}"


def readme_table() -> str:
    """A line for each method: the share of the uncompressed model's right answers at a tenth and a hundredth of the tokens.

    `make docs` does not put it into the README; a test says when it is not what stands there.
    """
    result = kept_result("compress")
    assert result is not None, "without a result there is nothing to tell"
    rows = [row for row in result["rows"] if row["accuracy"] is not None and row["batch"] == 4 and " + " not in row["method"]]
    known = {(row["method"], row["media"], row["retention"]): row for row in rows}
    columns = [
        (f"{title} at {told}", media, share) for media, title in (("image", "pictures"), ("clip", "clips")) for share, told in SHOWN[1:]
    ]
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows if row["retention"] in (0.1, 0.01)):
        found = {head: known.get((name, media, share)) for head, media, share in columns}
        (stage, *_) = (row["stage"] for row in rows if row["method"] == name)
        lines.append({"compression": f"`{name}`", "works in": stage} | {head: _share(row) if row else "" for head, row in found.items()})
    return table(lines)


def _line(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A method at the budgets that are shown; one that has others is shown at its own."""
    mine = [row for row in rows if row["method"] == name]
    known = {row["retention"]: row for row in mine}
    line = {"method": name, "works in": mine[0]["stage"]}
    if not any(share in known for share, _ in SHOWN):
        line |= {"method": f"{name}, at " + ", ".join(f"{row['retention']:.1%}: {_share(row)}" for row in mine)}
    line |= {told: _share(known[share]) if share in known else "" for share, told in SHOWN}
    at = known.get(0.1, mine[0])
    return line | {"choosing, ms": f"{at['compress_ms'] / at['batch']:.1f}", "speed at 10 %": f"{at['speedup']:.2f}"}


def _share(row: Mapping[str, Any]) -> str:
    return f"{100 * row['accuracy'] / max(row['accuracy_full'], 1e-9):.0f} %"
