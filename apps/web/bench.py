"""The tab of benches: what is committed under benchmarks/results, drawn; nothing is measured here."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from mmsdk import plugins
from mmsdk.apps.console import Cell
from mmsdk.apps.report import ROOT
from mmsdk.apps.web import markup
from mmsdk.apps.web.kept import memory_cards, server_card, table

__all__ = ["drawn", "tab"]

RESULTS = ROOT / "benchmarks" / "results"
PACKAGE = "mmsdk.apps.bench"
UNITS = {"ms": "ms", "mb": "MB", "mib": "MiB", "seconds": "s", "bytes": "bytes"}
ROWS = 24  # of a result that has no drawing of its own


@dataclass(frozen=True, slots=True)
class Chart:
    """How one result is drawn: bars of some columns, a row each, named by `label`; `scale` and `unit` are those of the words beside.

    `only` are a column and what it holds in the rows that are drawn; without it, all are.
    """

    bench: str
    title: str
    about: str
    label: tuple[str, ...]
    series: tuple[tuple[str, str], ...]
    unit: str = ""
    scale: float = 1.0
    whole: float = 0.0
    only: tuple[str, Cell] = ("", "")


CHARTS = (
    Chart(
        "mini", "What mini answers", "Held-out questions answered exactly; captions by the share of things named. Beside it the same model "
        "blind, and looking at another picture.", ("type",), (("accuracy", "mini"), ("blind", "blind"), ("shuffled", "another picture")),
        "%", 100.0, 1.0,
    ),
    Chart("engine", "Many at one time", "Tokens a second of so many requests together; 0 is one after the other without the engine.",
          ("concurrency",), (("throughput_tok_s", "tokens a second"),)),
    Chart("kv", "Memory of a token", "Keys and values of one token, by how they are kept.", ("kind",),
          (("bytes_per_token", "kB"),), "kB", 1e-3),
    Chart("kv", "What fewer bits cost", "Perplexity on the language reference; lower is better.", ("kind",),
          (("perplexity", "perplexity"),)),
    Chart("startup", "How soon", "Seconds, on two cores.", ("what",), (("seconds", "seconds"),), "s"),
    Chart("reach", "Beyond the length it was trained at", "A value found again, by attention and length; chance is 1 in 8.",
          ("attention", "length"), (("accuracy", "right"),), "%", 100.0, 1.0),
    Chart("compress", "Accuracy at a budget", "Each method at its share of tokens.", ("method", "media", "retention"),
          (("accuracy", "right"),), "%", 100.0, 1.0, only=("batch", 4)),
    Chart("decode", "Decoding", "Tokens a second of one answer.", ("engine", "weights"), (("decode_tok_s", "tokens a second"),)),
    Chart("levels", "Three levels of attention", "GB of keys and values in a model of 43 layers, and uncompressed.",
          ("level",), (("bytes", "as kept"), ("bytes_uncompressed", "uncompressed")), "GB", 1e-9, only=("model", "v4-flash, bfloat16")),
    Chart("parity", "The same as transformers", "Share of greedy tokens that are the same, by model.", ("model",),
          (("greedy_match", "the same"),), "%", 100.0, 1.0),
    Chart("kernels", "Registers of each kernel", "Compiled ahead of time for sm_90.", ("op", "case"),
          (("registers", "registers"),), only=("target", "sm_90")),
    Chart("followup", "Asking again", "Milliseconds to the first word of an answer about a picture and a clip: of the thing itself each "
          "time, of a cold copy of what was encoded, of the whole of it without compression, and from a memory in pages, which keeps what "
          "the first question read.", ("media", "asked"), (("total_ms", "ms"),), "ms"),
)  # fmt: skip


def tab() -> None:
    """Draw the tab."""
    gr.HTML(drawn(RESULTS), elem_id="bench")


def drawn(folder: Path) -> str:
    """Every result in a folder, those that have a chart first; where there is none, how to get one."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    if not results:
        told = "No result is kept here: they come with the source tree, and <code>mmsdk bench NAME --json</code> writes one."
        return f'<p class="mm-about">{told}</p>'
    charted = [_chart(chart, results[chart.bench]) for chart in CHARTS if chart.bench in results]
    named = {*(chart.bench for chart in CHARTS), "server", "memory"}
    if "server" in results:
        charted += [_section(*server_card(row), results["server"], wide=False) for row in results["server"]["rows"]]
    if "memory" in results:
        charted += [_section(*card, results["memory"], wide=True) for card in memory_cards(results["memory"]["rows"])]
    plain = [_plain(name, result) for name, result in results.items() if name not in named]
    intro = "Measured once and kept in the repository; every card says on what. Run one here and now with <code>mmsdk bench NAME</code>."
    return f'<p class="mm-about">{intro}</p><div class="mm-grid">{"".join([*charted, *plain])}</div>'


def _chart(chart: Chart, result: Mapping[str, Any]) -> str:
    column, only = chart.only
    rows: Sequence[Mapping[str, Cell]] = [row for row in result["rows"] if not column or row.get(column) == only]
    values = [[_value(row.get(column)) for column, _ in chart.series] for row in rows]
    whole = chart.whole or max([value for line in values for value in line if value is not None], default=1.0)
    lines = [_line(chart, row, line, whole) for row, line in zip(rows, values, strict=True) if any(value is not None for value in line)]
    names = "".join(f'<span><i class="mm-part{place}"></i>{html.escape(name)}</span>' for place, (_, name) in enumerate(chart.series))
    legend = f'<div class="mm-names">{names}</div>' if len(chart.series) > 1 else ""
    body = f'<p class="mm-about">{html.escape(chart.about)}</p>{legend}<div class="mm-rows">{"".join(lines)}</div>'
    return _section(chart.title, body, result, wide=len(rows) > 12)


def _line(chart: Chart, row: Mapping[str, Cell], values: Sequence[float | None], whole: float) -> str:
    label = " · ".join(_shown(row.get(column)) for column in chart.label)
    bars = "".join(
        f'<i class="mm-part{place}" style="width:{100 * max(0.0, value) / max(whole, 1e-9):.2f}%"></i>'
        for place, value in enumerate(values)
        if value is not None
    )
    first = next(value for value in values if value is not None)
    told = f"{markup.number(first * chart.scale) if chart.unit != '%' else f'{first * chart.scale:.0f}'} {chart.unit}".strip()
    return f"<div><span>{html.escape(label)}</span><em>{bars}</em><b>{told}</b></div>"


def _plain(name: str, result: Mapping[str, Any]) -> str:
    """A result that has no drawing of its own: what its bench says of itself, and its first rows."""
    rows: Sequence[Mapping[str, Cell]] = result["rows"]
    title, _, about = plugins.about(PACKAGE, name).partition(": ") if name in plugins.available(PACKAGE) else (name, "", "")
    shown = [{_heading(column): _shown(cell) for column, cell in row.items()} for row in rows[:ROWS]]
    more = f"{len(rows) - ROWS} more rows: <code>mmsdk bench {html.escape(name)} --committed</code>" if len(rows) > ROWS else ""
    above, below = (f'<p class="mm-about">{text}</p>' if text else "" for text in (html.escape(about[:1].upper() + about[1:]), more))
    return _section(title[:1].upper() + title[1:], above + table(shown) + below, result, wide=True)


def _heading(column: str) -> str:
    """A column's name as it is read, with its unit."""
    stem, _, last = column.rpartition("_")
    if column.endswith("tok_s"):
        return f"{column.removesuffix('tok_s').replace('_', ' ')}tokens a second"
    return f"{stem.replace('_', ' ')}, {UNITS[last]}" if stem and last in UNITS else column.replace("_", " ")


def _section(title: str, body: str, result: Mapping[str, Any], wide: bool) -> str:
    hardware, versions = result["hardware"], result["versions"]
    where = f"{hardware.get('gpu') or hardware['cpu']}, {hardware['cores']} cores · torch {versions['torch']} · {versions['commit'][:8]}"
    command = html.escape(result["command"].removesuffix(" --json"))
    foot = f"<footer><code>{command}</code><span>{html.escape(where)}</span></footer>"
    return f'<section class="mm-chart{" mm-wide" * wide}"><h3>{html.escape(title)}</h3>{body}{foot}</section>'


def _value(cell: Cell) -> float | None:
    return float(cell) if isinstance(cell, int | float) and not isinstance(cell, bool) else None


def _shown(cell: Cell) -> str:
    if cell is None:
        return "-"
    return markup.number(cell) if isinstance(cell, float) and abs(cell) >= 0.01 else f"{cell:.2g}" if isinstance(cell, float) else str(cell)
