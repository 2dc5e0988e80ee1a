"""Whether an arm is done: episodes that go on behind their end, in the real simulator, and how a rule ends them."""

import os

import pytest
import torch

from mmsdk.apps.robots.episodes import HELD_OUT
from mmsdk.apps.train_mini.needs import check_rendering
from mmsdk.apps.train_stop import done
from mmsdk.apps.train_stop.learn import Walks, rule_of, verify
from mmsdk.errors import InputError
from mmsdk.vla.stop import StopRule


def walks(n: int = 40, t: int = done.ANSWERS) -> Walks:
    """Arms of nobody: the first number of what is known rises when the task is done."""
    generator = torch.Generator().manual_seed(0)
    near = torch.arange(t) >= torch.randint(5, t - 5, (n, 1), generator=generator)
    hidden = torch.randn(n, t, 8, generator=generator) + 4 * near[..., None] * (torch.arange(8) == 0)
    return Walks(hidden, torch.full((n, t), done.GO_ON), near)


def test_a_verifier_learns_to_end_what_is_done_and_is_told_of_as_it_is() -> None:
    head, seen = done.verifier(8), walks()
    for _ in verify(head, seen, 60, rows=24):
        pass
    rule = rule_of(head.eval(), seen)
    told = done.row("a task", head, rule, seen)
    assert told["oracle"] == 1.0 and float(str(told["success"])) > 0.8 and 0 <= float(str(told["late_s"])) < 3
    assert float(str(told["success"])) + float(str(told["false_stop"])) + float(str(told["missed_stop"])) == pytest.approx(1)
    # who never ends anything misses all of it
    never = done.row("a task", head, StopRule(force=2.0), seen)
    assert (never["success"], never["false_stop"], never["missed_stop"], never["late_s"]) == (0, 0, 1, 0)


def test_episodes_go_on_when_they_are_done_and_tell_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        check_rendering()
    except InputError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    monkeypatch.setattr(done, "ANSWERS", 16)
    seen = done.watched("drawer-close-v3", [HELD_OUT])
    assert seen.hidden.shape[:2] == seen.near.shape == (1, 16) and bool((seen.proposed == done.GO_ON).all())
    assert not bool(seen.near[0, 0]) and bool(seen.near[0, -1]), "a drawer is closed within five seconds"
    assert bool((seen.near[0].long().diff() >= 0).all()) and bool(seen.hidden[0].diff(dim=0).abs().sum(1).min() > 0)
