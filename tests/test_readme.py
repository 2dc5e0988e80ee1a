"""The README's numbers are those of the committed results: whoever reruns a bench must correct them."""

import hashlib
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def result(bench: str) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{bench}.json").read_text(encoding="utf-8"))
    return kept


def rows(bench: str) -> list[dict[str, float | str]]:
    found: list[dict[str, float | str]] = result(bench)["rows"]
    return found


def table(heading: str) -> dict[str, list[str]]:
    """Cells by the first one, of the table whose header line begins so."""
    lines = README[README.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_the_table_of_mini_is_the_committed_result() -> None:
    found = {str(row["type"]): row for row in rows("mini")}
    shown = table("question")
    assert shown.keys() == found.keys() and "all but captions" in shown
    for kind, (n, *shares) in shown.items():
        row = found[kind]
        assert int(n.replace(",", "")) == row["n"]
        assert [int(share.removesuffix(" %")) for share in shares] == [
            round(100 * float(row[key])) for key in ("accuracy", "blind", "shuffled")
        ]


def test_the_result_of_mini_is_that_of_the_adapter_that_ships() -> None:
    with (ROOT / "mmsdk" / "models" / "mini_adapter.safetensors").open("rb") as shipped:
        assert result("mini")["versions"]["mini_adapter"] == hashlib.file_digest(shipped, "sha256").hexdigest()[:16]


def test_every_bench_that_the_readme_quotes_is_kept() -> None:
    for name in set(re.findall(r"mmsdk bench (\w+) --committed", README)):
        assert rows(name)


@pytest.mark.parametrize("what", ["import mmsdk", "mmsdk --help"])
def test_the_times_of_starting_are_the_committed_ones(what: str) -> None:
    (seconds,) = (float(row["seconds"]) for row in rows("startup") if row["what"] == what)
    assert f"{1000 * seconds:.0f} ms" in README


def test_the_parity_is_the_committed_one() -> None:
    (real,) = (row for row in rows("parity") if row["model"] == "SmolLM2-135M-Instruct float32")
    assert f"largest difference of a logit | {float(real['max_abs_logit_diff']):.5f} |" in README
    assert real["greedy_match"] == 1.0 and f"all {real['tokens']:,}" in README


def test_the_times_of_a_second_question_are_the_committed_ones() -> None:
    took = {(row["media"], row["asked"]): f"{float(row['total_ms']):,.0f}" for row in rows("followup")}
    told = "; ".join(f"{took[media, 'paged first']}, {took[media, 'paged again']}" for media in ("image", "clip"))
    assert f"| {told} | `mmsdk bench followup --committed` |" in README


def test_what_compression_keeps_is_the_committed_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there is one: a line for each method, and the drawing. What is to stand there is what the program of the pages makes."""
    unmeasured = "accuracy and speed not yet measured" in README
    assert unmeasured != (ROOT / "benchmarks" / "results" / "compress.json").is_file()
    if not unmeasured:
        monkeypatch.syspath_prepend(ROOT / "docs" / "_site")
        assert importlib.import_module("choice").readme_table() in README
        assert "](docs/images/compression.svg)" in README and (ROOT / "docs" / "images" / "compression.svg").is_file()
