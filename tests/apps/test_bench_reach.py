"""The bench of reach after a step of training: what each attention reads, and that a needle is never said to be found where none is read.

What a whole training gives is kept in benchmarks/results/reach.json; it takes minutes.
"""

from mmsdk.apps.bench.reach import Reach


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
