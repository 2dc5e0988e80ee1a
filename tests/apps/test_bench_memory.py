"""The bench of memories on real models, asked little: rows of all policies and budgets that were asked for, and smaller memories in them.

What a whole run gives is kept in benchmarks/results/memory.json; it takes minutes.
"""

from pathlib import Path

import pytest

from mmsdk.apps.bench.memory import BUDGETS, Memory
from mmsdk.apps.console import Cell
from mmsdk.errors import InputError
from mmsdk.weights.bundle import Bundle

KEYS = ["suite", "policy", "budget", "quality", "quality_full", "bytes_held", "bytes_read_per_token", "tok_s", "frames"]


def of(rows: list[dict[str, Cell]], suite: str, policy: str, key: str) -> list[float]:
    return [float(str(row[key])) for row in rows if row["suite"] == suite and row["policy"] == policy]


def test_rows_tell_what_a_memory_keeps_and_costs(mini_bundle: Bundle, book: Path, emoji: Path, photos: Path, tmp_path: Path) -> None:
    plot = tmp_path / "memory.svg"
    rows = Memory(suites="text+stream", policies="window", quick=True, plot=str(plot))()
    assert all(list(row) == KEYS for row in rows)
    assert of(rows, "text", "window", "budget") == list(BUDGETS)
    held, read = of(rows, "text", "window", "bytes_held"), of(rows, "text", "window", "bytes_read_per_token")
    assert held == sorted(held, reverse=True) and read == sorted(read, reverse=True)
    assert held[0] < 0.6 * of(rows, "text", "full", "bytes_held")[0]
    (full,) = of(rows, "text", "full", "quality")
    # a novel: worse than one in two, far better than one of 49,152 words
    assert 0.02 < full < 0.5 and set(of(rows, "text", "window", "quality_full")) == {full}
    # the window has lost its first token, which this model leans on
    assert of(rows, "text", "window", "quality")[2] < 0.5 * full
    assert of(rows, "text", "kv-streams", "bytes_held") == of(rows, "text", "re-prefill", "bytes_held")
    on = [row for row in rows if str(row["policy"]).endswith("going on")]
    assert [row["frames"] for row in on] == [8, 16, 24, 32] and on[2]["bytes_held"] == on[3]["bytes_held"]
    assert {row["policy"] for row in rows if row["suite"] == "stream"} >= {"full", "window", "watch evs"}
    assert plot.read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize(
    ("knobs", "hint"), [({"suites": "txt"}, "'txt' is not known"), ({"policies": "h2o+h3o"}, "'h3o'"), ({"texts": 0}, "texts")]
)
def test_what_cannot_be_measured_is_named(knobs: dict[str, str | int], hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        Memory(**knobs)()
