"""The training program at toy length: the same run whether interrupted or not, and from demonstrations to rows end to end."""

import json
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mmsdk.apps.train_belt.__main__ import main
from mmsdk.apps.train_belt.eyes import Eyes, teach
from mmsdk.apps.train_belt.learn import learn, load
from mmsdk.apps.train_belt.lessons import Lessons
from mmsdk.apps.train_belt.rows import rows
from mmsdk.apps.train_belt.student import Recipe, Student
from mmsdk.apps.train_mini.needs import check_rendering
from mmsdk.errors import InputError
from mmsdk.vla.envs.belt import CHUNK, LIMIT

TOY = Recipe("dual", width=16, layers=2, heads=2, steps=4, rows=3, warmup=1)


def drawn(n: int = 12) -> dict[str, Tensor]:
    """Demonstrations of nobody: a square of one colour for each thing, at places that move along."""
    generator = torch.Generator().manual_seed(0)
    decisions = LIMIT // CHUNK
    start, speed = torch.rand(n, 2, generator=generator) * 0.4 - 0.2, torch.rand(n, 1, generator=generator) * 0.04 - 0.02
    along = start[:, None] + speed[:, None] * torch.arange(decisions)[:, None]
    places = torch.stack((torch.tensor([-0.06, 0.06]).expand_as(along), along), dim=-1)
    pictures = torch.full((n, decisions, 3, 32, 96), 40, dtype=torch.uint8)
    for row in range(n):
        for moment in range(decisions):
            for thing, colour in ((0, 0), (1, 2)):
                column = round(float(along[row, moment, thing]) / 0.52 * 48 + 48)
                pictures[row, moment, colour, 18 + 6 * thing : 23 + 6 * thing, column - 2 : column + 3] = 230
    return {
        "pictures": pictures,
        "places": places,
        "lamps": torch.full((n, decisions), -1),
        "there": torch.ones(n, 2, dtype=torch.bool),
        "states": torch.randn(n, LIMIT, 5, generator=generator),
        "actions": torch.randn(n, LIMIT, 4, generator=generator),
        "counts": torch.ones(n, LIMIT, dtype=torch.bool),
        "go": CHUNK * torch.randint(3, 9, (n,), generator=generator),
        "cued": torch.rand(n, generator=generator) < 0.5,
    }


@pytest.fixture(scope="module")
def lessons() -> Lessons:
    torch.manual_seed(0)
    return Lessons.of(drawn(), Eyes())


def test_a_run_in_pieces_is_the_run_in_one(lessons: Lessons, tmp_path: Path) -> None:
    whole = dict(learn(lessons, TOY, tmp_path / "whole"))
    with closing(learn(lessons, TOY, tmp_path / "pieces")) as learning:
        # stopped from outside, as by a deadline, after one
        first = dict([next(learning)])
    rest = dict(learn(lessons, TOY, tmp_path / "pieces"))
    assert (list(first), list(rest)) == ([1], [2, 3, 4]) and first | rest == whole
    ours, theirs = (load_file(tmp_path / name / "dual-0.safetensors") for name in ("whole", "pieces"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert list(learn(lessons, TOY, tmp_path / "whole")) == []


def test_a_checkpoint_of_another_recipe_is_refused(lessons: Lessons, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint"):
        load(TOY, tmp_path)
    with closing(learn(lessons, TOY, tmp_path)) as learning:
        next(learning)
    with pytest.raises(InputError, match="it was made by .*rows=3.*, this is .*rows=5"):
        load(replace(TOY, rows=5), tmp_path)


@pytest.mark.parametrize("condition", ["none", "slow", "fast", "dual"])
def test_a_lesson_holds_what_its_memory_would_and_is_a_function_of_seed_and_step_alone(lessons: Lessons, condition: str) -> None:
    recipe = replace(TOY, condition=condition)
    student, deepest = Student(recipe), 0
    for step in range(6):
        first, again = (lessons.branches(student, recipe, torch.Generator().manual_seed(step)) for _ in range(2))
        assert torch.equal(first.sight, again.sight) and torch.equal(first.actions, again.actions)
        assert first.state.shape == (3, 3, 5) and first.actions.shape == (3, 3, CHUNK, 4) and first.deltas == (1 / 3, 2 / 3)
        deepest = max(deepest, first.known.shape[1])
    assert deepest == 1 if condition in ("none", "fast") else deepest > 1


def test_a_few_steps_lower_the_loss(lessons: Lessons) -> None:
    student, losses = Student(TOY), list[float]()
    optimiser = torch.optim.AdamW(student.parameters(), lr=5e-3)
    for _ in range(10):
        loss = lessons.loss(student, TOY, 3)
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < 0.9 * losses[0]


def test_eyes_learn_where_things_are() -> None:
    eyes, error = teach(drawn(), 60, rows=24)
    assert error < 0.05
    seen = eyes.features(drawn()["pictures"][:, 0].float() / 127.5 - 1)
    assert bool((seen[:, :2, 2] > 0.5).all()) and bool((seen[:, 2:, 2] < 0.5).all())


def test_from_demonstrations_to_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        check_rendering()
    except InputError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    sizes = ["--demonstrations", "2", "--looks", "2", "--steps", "1", "--rows", "2", "--conditions", "dual", "--threads", "1"]
    main(["--folder", str(tmp_path), *sizes, "--episodes", "0"])
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(line) for line in told] == [["eyes", "off by metres"]]
    (row,) = rows("cue", 1, ("dual",), tmp_path)
    assert (row["suite"], row["condition"], row["n"]) == ("cue", "dual", 1)
    assert 0 <= row["ci_low"] <= row["success"] <= row["ci_high"] <= 1 and 0 < row["latency_p50_ms"] <= row["latency_p95_ms"]
    assert row["success"] + row["unsafe"] + row["wrong"] + row["missed"] == 1


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no 'belts'; there is moving-belt, cue"):
        next(rows("belts"))
    with pytest.raises(InputError, match="no dual.safetensors; train it"):
        next(rows("cue", 1, ("dual",), tmp_path))
