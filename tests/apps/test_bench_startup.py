"""The startup bench on the real model: every row says in which number format it was measured, and answers over how many tokens."""

import torch

from mmsdk.apps.bench.startup import LONGEST, Startup
from mmsdk.precision import resolve_dtype
from mmsdk.weights.bundle import Bundle


def test_rows_say_what_they_were_measured_on(mini_bundle: Bundle) -> None:
    rows = Startup(repeats=1)()
    assert all(row.keys() == {"what", "seconds", "dtype", "tokens"} for row in rows)
    dtype = str(resolve_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    assert [row["dtype"] for row in rows] == [None] * 3 + [dtype] * 4
    *before, first, warm, longer = [row["tokens"] for row in rows]
    assert before == [None] * 4 and first == warm
    assert all(isinstance(count, int) and 1 <= count <= LONGEST for count in (warm, longer))
