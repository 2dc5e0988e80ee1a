"""The bench of parity on one prompt and a few tokens: ours are those of transformers."""

from pathlib import Path

from mmsdk.apps.bench.parity import Parity


def test_a_short_run_finds_no_difference(mini_language: Path) -> None:
    rows = Parity(prompts=1, tokens=2)()
    assert rows[0]["model"] == "SmolLM2-135M-Instruct float32" and rows[0]["tokens"] == 2
    for row in rows:
        assert row.keys() == rows[0].keys()
        assert row["greedy_match"] == 1.0 and float(row["max_abs_logit_diff"]) < 1e-3, row["model"]
