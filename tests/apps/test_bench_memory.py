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
KEYS += ["n", "ci_low", "ci_high", "against", "better", "worse", "p"]


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
    # streams that go on: memory that stays the same from when it is full, windows of as many bytes, and answers at every time
    on = {name: [row for row in rows if row["policy"] == f"{name}, going on"] for name in ("h2o", "window", "streaming")}
    for going in on.values():
        assert [row["frames"] for row in going] == [16, 32, 48, 64] and {row["n"] for row in going} == {2}
        assert going[2]["bytes_held"] == going[3]["bytes_held"]
    held, *windows = (of(rows, "stream", f"{name}, going on", "bytes_held")[-1] for name in on)
    assert all(held <= window < 1.1 * held for window in windows)
    assert all(row["against"] in ("window", "streaming") for row in on["h2o"]) and on["window"][0]["against"] is None
    asked = [row for row in rows if row["suite"] == "stream" and row["policy"] in ("full", "window", "watch evs")]
    assert all(row["n"] == 2 and 2 * float(str(row["quality"])) in (0, 1, 2) for row in asked)
    assert {row["policy"] for row in rows if row["suite"] == "stream"} >= {"full", "window", "watch evs"}
    assert plot.read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize(
    ("knobs", "hint"),
    [
        ({"suites": "txt"}, "'txt' is not known"),
        ({"policies": "h2o+h3o"}, "'h3o'"),
        ({"texts": 0}, "texts"),
        ({"events": 8}, "8 shapes and what follows take at least 72"),
        ({"endless": 63}, "at least 64"),
    ],
)
def test_what_cannot_be_measured_is_named(knobs: dict[str, str | int], hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        Memory(**knobs)()
