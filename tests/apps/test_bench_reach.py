"""The bench of reach after a step of training: what each attention reads, and that a needle is never said to be found where none is read.

What a whole training gives is kept in benchmarks/results/reach.json; it takes minutes.
"""

import json

from mmsdk.apps.bench.reach import Reach
from mmsdk.apps.report import ROOT


def test_a_short_run_counts_what_is_read() -> None:
    rows = Reach(steps=1, rows=2, asked=3)()
    assert len(rows) == 9 and len({tuple(row) for row in rows}) == 1
    read = {(row["attention"], row["length"]): row["read"] for row in rows}
    # HiLS: a window of 8 and four chunks of 4; NSA: a window of 8 and six blocks of 4
    assert read["full", 1024] == 1024 and read["hils", 1024] == read["hils", 64] == 24 and read["nsa", 256] == 32
    for row in rows:
        found, accuracy = float(str(row["found"])), float(str(row["accuracy"]))
        assert 0 <= accuracy <= 1 and 0 <= found <= 1 and (row["attention"] != "full" or found == 1)
        # untrained, the few tokens that are read of many are seldom the right ones
        assert row["length"] != 1024 or row["attention"] == "full" or found < 0.5


def test_the_kept_result_reaches_16_times_as_far_as_it_was_trained() -> None:
    """Landmarks find nearly every needle at 16 times the length, where rotated full attention guesses; NSA finds what it chooses."""
    kept = json.loads((ROOT / "benchmarks" / "results" / "reach.json").read_text(encoding="utf-8"))
    rows = {(row["attention"], row["length"] // row["trained_at"]): row for row in kept["rows"]}
    assert rows["full", 1]["accuracy"] > 0.95 and rows["full", 16]["accuracy"] < 0.3
    assert all(rows["hils", times]["accuracy"] > 0.95 and rows["hils", times]["found"] > 0.95 for times in (1, 4, 16))
    # half of the tokens are read at the length of training
    assert rows["nsa", 1]["accuracy"] > 0.7 and rows["nsa", 1]["found"] > rows["nsa", 1]["read"] / 64 + 0.2
