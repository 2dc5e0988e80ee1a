"""The bench of robots: its rows, how it goes on from a file, and what it was to reach."""

import os
from pathlib import Path

import pytest

from mmsdk.apps.bench.robot import COLUMNS, MORE, Robot
from mmsdk.apps.console import Cell
from mmsdk.apps.robots.aims import aims
from mmsdk.apps.train_mini.needs import check_rendering
from mmsdk.apps.train_stop.__main__ import main as train_stop
from mmsdk.errors import InputError


def test_a_broken_loop_is_measured_fault_by_fault_and_goes_on_from_a_file(tmp_path: Path) -> None:
    saved = tmp_path / "rows.jsonl"
    bench = Robot(suites="loop", ticks=20, saved=str(saved))
    rows = bench()
    assert all(tuple(row) == (*COLUMNS, *MORE) for row in rows) and len(rows) == 20
    assert {row["task"] for row in rows} == {"arm by position", "arm by velocity"}
    assert all(row["n"] == (200 if row["condition"] == "everything" else 20) and row["unsafe"] == 0 for row in rows)
    assert all(0 < float(str(row["latency_p50_ms"])) <= float(str(row["latency_p95_ms"])) for row in rows)
    (aim,) = bench.aims(rows)
    assert aim["reached"] == "760 ticks, 0" and aim["met"] == "no"
    lines = saved.read_text(encoding="utf-8").splitlines()
    assert bench() == rows
    # the last part was not finished
    saved.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    again = bench()
    assert again[:-1] == rows[:-1] and again[-1]["success"] == rows[-1]["success"]
    with pytest.raises(InputError, match="other settings"):
        Robot(suites="loop", ticks=21, saved=str(saved))()
    # what another policy did is never mixed in
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"another policy")
    with pytest.raises(InputError, match="other settings"):
        Robot(suites="loop", ticks=20, saved=str(saved), weights=str(other))()


def test_walks_are_measured_with_what_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--steps", "2", "--rows", "4", "--walks", "6", "--verifying", "2", "--threads", "1", "--episodes", "0"]
    train_stop(["--folder", str(tmp_path), *sizes])
    bench = Robot(suites="navigation", walks=3, walker=str(tmp_path))
    rows = bench()
    assert [(row["condition"], row["n"], row["stalled"]) for row in rows] == [("backbone", 3, None), ("verified", 3, None)]
    assert all(row["false_stop"] is not None for row in rows) and {"walker", "verifier"} < set(bench.versions())


def test_the_verifier_that_ships_ends_more_walks_where_they_should_end() -> None:
    alone, verified = Robot(suites="navigation", walks=200)()
    assert float(str(verified["success"])) > float(str(alone["success"])) + 0.05
    assert float(str(verified["missed_stop"])) < float(str(alone["missed_stop"]))


def test_the_memories_that_ship_remember_what_was_shown() -> None:
    _drawn()
    found = {str(row["condition"]): float(str(row["success"])) for row in Robot(suites="cue", belts=20)()}
    assert found["dual"] >= 0.5 > 0.3 >= found["none"] and found["dual"] > max(found["slow"], found["fast"])


def test_the_default_policy_is_measured_task_by_task(tmp_path: Path) -> None:
    _drawn()
    names = {"suites": "metaworld-mt10", "conditions": "default", "episodes": 1, "saved": str(tmp_path / "rows.jsonl")}
    first = Robot(**names, tasks="drawer-close-v3", timing=False)()
    both = Robot(**names, tasks="drawer-close-v3+window-close-v3")()
    assert [row["task"] for row in first] == ["drawer-close-v3", "1 tasks"] and first[0]["latency_p50_ms"] is None
    assert [row["task"] for row in both] == ["drawer-close-v3", "window-close-v3", "2 tasks"]
    times = {name: cell for name, cell in both[2].items() if name.startswith("latency")}
    assert both[0] == first[0] | times and all(0 < float(str(cell)) < 60_000 for cell in times.values())
    assert both[2]["n"] == 2 and both[2]["success"] == (float(str(both[0]["success"])) + float(str(both[1]["success"]))) / 2
    assert all(row["unsafe"] == 0 and row["stalled"] in (0, 1) for row in both[:2])


@pytest.mark.parametrize(
    ("knobs", "hint"),
    [
        ({"suites": "metaworld"}, "'metaworld' is not known; join some of metaworld-mt10"),
        ({"conditions": "default+drunk"}, "drunk"),
        ({"tasks": "fly-v3"}, "'fly-v3' is not known"),
        ({"walks": 0}, "walks"),
    ],
)
def test_what_cannot_be_measured_is_named(knobs: dict[str, str | int], hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        Robot(**knobs)()


def _drawn() -> None:
    """Skip, but not in CI, where nothing can be drawn."""
    try:
        check_rendering()
    except InputError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def row(suite: str, task: str, condition: str, low: float, high: float, **more: Cell) -> dict[str, Cell]:
    told: tuple[Cell, ...] = (suite, task, condition, (low + high) / 2, 100, low, high, 1.0, 2.0, 0)
    return dict(zip(COLUMNS, told, strict=True)) | dict.fromkeys(MORE) | more


def test_aims_are_met_where_intervals_are_apart() -> None:
    mt10 = [row("metaworld-mt10", "all", name, *ends) for name, ends in (("default", (0.78, 0.88)), ("blind", (0.2, 0.3)))]
    mt10.append(row("metaworld-mt10", "all", "wrong-instruction", 0.7, 0.8))
    belts = [row("cue", "pick", name, *ends) for name, ends in (("none", (0.0, 0.1)), ("slow", (0.3, 0.5)), ("dual", (0.6, 0.8)))]
    walks = [row("navigation", "stop", name, *ends, false_stop=0.1) for name, ends in (("backbone", (0.4, 0.5)), ("verified", (0.7, 0.9)))]
    found = {str(aim["aim"]): aim for aim in aims([*mt10, *belts, *walks])}
    assert [aim["met"] for aim in found.values()] == ["yes", "yes", "no", "yes", "yes"]
    assert found["dual memory, what was shown is picked"]["reached"] == (
        "dual 70.0% (60% to 80%) of 100, none 5.0% (0% to 10%) of 100, slow 40.0% (30% to 50%) of 100"
    )
    assert aims(mt10[1:]) == []
