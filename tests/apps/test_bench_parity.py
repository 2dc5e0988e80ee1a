"""The bench of parity on one prompt and a few tokens: ours are those of transformers."""

from pathlib import Path

from mmsdk.apps.bench.parity import Parity
from mmsdk.families import families


def test_a_short_run_finds_no_difference(mini_language: Path) -> None:
    rows = Parity(prompts=1, tokens=2)()
    assert rows[0]["model"] == "SmolLM2-135M-Instruct float32" and rows[0]["tokens"] == 2
    for row in rows:
        assert row.keys() == rows[0].keys()
        apart = row["max_abs_logit_diff"]
        assert row["greedy_match"] == 1.0 and (apart is None or float(apart) < 1e-3), row["model"]
    # every family has a row by its model_type, but for parts of others and the model that ships here
    assert {row["model"] for row in rows} >= {*families()} - {"mini"}
    ways = [row["model"].rsplit(", ", 1)[1] for row in rows if row["max_abs_logit_diff"] is None]
    assert ways == ["dense", "paged", "prefix hit", "batch", "engine"]
