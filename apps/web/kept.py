"""Cards of kept results that bars do not tell: what memories keep, a table a suite, and a server under load, a few numbers."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from mmsdk.apps.console import Cell
from mmsdk.apps.memory.rows import GOING
from mmsdk.apps.web import markup

__all__ = ["memory_cards", "server_card", "table"]

Row = Mapping[str, Cell]
BUDGETS = (0.5, 0.25, 0.1, 0.05, 0.025)
TENTH = 0.1
SUITES = {
    "text": ("Memory of long texts", "how likely the words are that follow a long text, their probabilities' geometric mean"),
    "needle": ("Memory of needles", "the right digits of a number hidden in a long text"),
    "clip": ("Memory of long clips", "right answers to questions about clips"),
    "stream": ("Memory of streams", "right answers about the beginning of a stream that went on"),
}
ABOUT = (
    "Each line is a policy of keys and values; the columns are the shares of them that it holds, or reads. Told is {asked}, in percent of "
    "what the full cache gives, {full}. What is held in MB, what is read for each token, and the speed are those at {at:g} %."
)
GOING_ON = "Streams that go on: what is held and read after so many frames, how fast, and how many answers about the beginning are right."


def memory_cards(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Of the rows of the bench of memories, title and body of a card for each suite that was measured."""
    return [(SUITES[suite][0], _suite(suite, here)) for suite in SUITES if (here := [row for row in rows if row["suite"] == suite])]


def server_card(row: Row) -> tuple[str, str]:
    """Of the row of the bench of the server, title and body of its card."""
    shown = {name: markup.number(_number(row[name])) for name in ("requests", "concurrency", "cancelled", "malformed", "lost")}
    about = (
        "OpenAI's client asks <code>mmsdk serve</code> {requests} times, {concurrency} at one time; {cancelled} leave early and "
        "{malformed} ask nonsense. No answer may be lost and nothing may stay behind."
    ).format(**shown)
    first = row["p95_ttft_ms"]
    told = [
        markup.Fact("answers lost", shown["lost"], f"of {shown['requests']} requests"),
        markup.Fact("blocks left behind", markup.number(_number(row["leaked_blocks"])), "of keys and values"),
        markup.Fact("95 of 100 begin within", "-" if first is None else markup.number(_number(first) / 1000), "s, to the first token"),
        markup.Fact("the process grew by", f"{_number(row['rss_growth_mb']):.1f}", "MiB"),
    ]
    return "A server under load", f'<p class="mm-about">{about}</p>{markup.facts(told)}'


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """A table of plain text; its columns are those of all rows, and where a row has none of them, nothing stands."""
    empty = ""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = "".join(f"<tr>{''.join(f'<td>{html.escape(row.get(column, empty))}</td>' for column in columns)}</tr>" for row in rows)
    return f'<div class="mm-scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _suite(suite: str, rows: Sequence[Row]) -> str:
    """A line for each policy that was measured beside the full cache, that one first, and below a stream without end, if there is one."""
    going = [row for row in rows if str(row["policy"]).endswith(GOING)]
    scored = [row for row in rows if row not in going and row["quality"] is not None and row["quality_full"] is not None]
    full = next((row for row in scored if row["policy"] == "full"), None)
    parts = []
    if full is not None:
        budgets = [budget for budget in BUDGETS if any(row["budget"] == budget for row in scored)]
        at = TENTH if TENTH in budgets else min(budgets, default=TENTH)
        about = ABOUT.format(asked=SUITES[suite][1], full=f"{100 * _number(full['quality']):.3g} %", at=100 * at)
        names = dict.fromkeys(str(row["policy"]) for row in scored)
        lines = [_policy(name, [row for row in scored if row["policy"] == name], full, budgets, at) for name in names]
        parts += [f'<p class="mm-about">{about}</p>', table(lines)]
    if going:
        parts += [f'<p class="mm-about">{GOING_ON}</p>', table([_going(row) for row in going])]
    return "".join(parts)


def _policy(name: str, rows: Sequence[Row], full: Row, budgets: Sequence[float], at: float) -> dict[str, str]:
    """A policy at these budgets, and what it costs at one of them."""
    known = {row["budget"]: row for row in rows}
    line = {"policy": "full cache" if name == "full" else name}
    for budget in budgets:
        row = full if name == "full" else known.get(budget)
        line[f"{100 * budget:g} %"] = "" if row is None else _percent(_number(row["quality"]) / max(_number(full["quality"]), 1e-9))
    return line | _costs(full if name == "full" else known.get(at))


def _costs(row: Row | None) -> dict[str, str]:
    names = "held, MB", "read for a token, MB", "tokens a second"
    if row is None:
        return dict.fromkeys(names, "")
    held, read = (_number(row[name]) / 1e6 for name in ("bytes_held", "bytes_read_per_token"))
    return dict(zip(names, map(markup.number, (held, read, _number(row["tok_s"]))), strict=True))


def _going(row: Row) -> dict[str, str]:
    line = {"policy": str(row["policy"]).removesuffix(GOING), "frames": markup.number(_number(row["frames"]))}
    # results from before these streams were asked anything say nothing of it
    right = "" if row["quality"] is None else _percent(_number(row["quality"]))
    return line | {"right": right} | _costs(row)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _number(cell: Any) -> float:
    return float(cell)
