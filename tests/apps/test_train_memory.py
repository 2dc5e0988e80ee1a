"""The training program at toy length: the same run whether interrupted or not, every condition end to end, and what it prints."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmsdk.apps.train_memory.__main__ import main
from mmsdk.apps.train_memory.learn import learn, load
from mmsdk.apps.train_memory.lessons import lesson, loss_of
from mmsdk.apps.train_memory.student import Recipe, Student
from mmsdk.apps.train_memory.trial import wilson
from mmsdk.errors import InputError

TOY = Recipe("dual", width=16, layers=2, heads=2, steps=4, rows=2, warmup=1)


def test_a_run_in_pieces_is_the_run_in_one(tmp_path: Path) -> None:
    whole = dict(learn(TOY, tmp_path / "whole", TOY.steps))
    first = dict(learn(TOY, tmp_path / "pieces", 1))
    with closing(learn(TOY, tmp_path / "pieces", TOY.steps)) as learning:
        # stopped from outside, as by a deadline, after one more
        second = dict([next(learning)])
    third = dict(learn(TOY, tmp_path / "pieces", TOY.steps))
    assert (list(first), list(second), list(third)) == ([1], [2], [3, 4])
    assert first | second | third == whole
    ours, theirs = (load_file(tmp_path / name / "dual-0.safetensors") for name in ("whole", "pieces"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert list(learn(TOY, tmp_path / "whole", TOY.steps)) == []


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint"):
        load(TOY, tmp_path)
    list(learn(TOY, tmp_path, 1))
    with pytest.raises(InputError, match="it was made by .*rows=2.*, this is .*rows=5"):
        load(replace(TOY, rows=5), tmp_path)


def test_a_few_steps_lower_the_loss() -> None:
    student, losses = Student(TOY), list[float]()
    optimiser = torch.optim.AdamW(student.parameters(), lr=5e-3)
    for _ in range(8):
        loss = loss_of(student, TOY, 3)
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < 0.9 * losses[0]


def test_a_lesson_is_a_function_of_seed_and_step_alone() -> None:
    student = Student(TOY)
    with torch.no_grad():
        for step in range(3):
            first, _ = lesson(student, TOY, step)
            torch.rand(5)
            again, _ = lesson(student, TOY, step)
            other, _ = lesson(student, replace(TOY, seed=1), step)
            assert torch.equal(first.sight, again.sight) and torch.equal(first.actions, again.actions)
            assert first.state.shape == (2, 3, 4) and first.actions.shape == (2, 3, 10, 3)
            assert first.sight.shape != other.sight.shape or not torch.equal(first.sight, other.sight)


def test_every_condition_runs_end_to_end_and_prints_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--folder", str(tmp_path), "--steps", "1", "--rows", "2", "--episodes", "2", "--flow", "1"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["condition"], row["suite"]) for row in rows] == [
        (condition, suite) for condition in ("none", "slow", "fast", "dual") for suite in ("moving-belt", "cue")
    ]
    for row in rows:
        assert row["n"] == 2 and 0 <= row["ci_low"] <= row["success"] <= row["ci_high"] <= 1 and row["latency_p50_ms"] > 0
        assert row["success"] * 2 + row["stalled"] + row["wrong"] + row["missed"] == 2


def test_training_stops_when_its_time_is_over_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--folder", str(tmp_path), "--conditions", "slow", "--steps", "3", "--rows", "2", "--seconds", "0"])
    assert json.loads(capsys.readouterr().out) == {"condition": "slow", "steps": 1, "of": 3}
    assert load(Recipe("slow", steps=3, rows=2), tmp_path)[1] == 1


def test_wilsons_interval() -> None:
    # values of R's binom.confint(method = "wilson")
    assert [round(edge, 4) for edge in wilson(95, 100)] == [0.8882, 0.9785]
    assert [round(edge, 4) for edge in wilson(0, 100)] == [0.0, 0.037]
