"""The walker and its stop verifier at toy length, from nothing to rows."""

import json
from pathlib import Path

import pytest
import torch

from mmsdk.apps.train_stop.__main__ import main
from mmsdk.apps.train_stop.learn import rule_of, teach, verify, walked
from mmsdk.apps.train_stop.trial import rows, trial
from mmsdk.apps.train_stop.walker import Walker, verifier
from mmsdk.errors import InputError
from mmsdk.vla.envs.rooms import LIMIT
from mmsdk.vla.heads.latte import STOP
from mmsdk.vla.stop import Recorded, StopRule


def test_learning_lowers_the_loss_and_is_a_function_of_the_seed() -> None:
    losses = list(teach(Walker(), 30, rows=24))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert list(teach(Walker(), 3, rows=8)) == list(teach(Walker(), 3, rows=8))


def test_walks_go_on_past_every_stop_and_the_rule_stops_wrongly_less_often_than_the_backbone() -> None:
    walker, head = Walker(), verifier()
    walks = walked(walker, 24, seed=1)
    assert walks.hidden.shape == (24, LIMIT, 64) and walks.proposed.shape == walks.near.shape == (24, LIMIT)
    # a backbone that knows nothing still proposes something of everything
    walks.proposed[:, ::3] = STOP
    losses = list(verify(head, walks, 12, rows=12))
    assert losses[-1] < losses[0]
    rule = rule_of(head, walks)
    opinion, _ = head(walks.hidden, walks.proposed)
    seen = Recorded(opinion.probability, opinion.first, walks.proposed, walks.near)
    found, alone = seen.report(rule), seen.report(StopRule(accept=0.0, force=2.0))
    assert alone.false_stop > 0.5 and found.false_stop < alone.false_stop and found.n == 24


def test_who_always_stops_at_once_succeeds_only_where_it_began_near() -> None:
    outcome = trial(Walker(), lambda: lambda hidden, proposed, other: torch.zeros_like(proposed), "stops", 20)
    assert outcome.success + outcome.false_stop == 1 and outcome.success < 0.3 and outcome.missed_stop == 0
    never = trial(Walker(), lambda: lambda hidden, proposed, other: other, "never", 20)
    assert never.success == never.false_stop == 0 and never.missed_stop == never.oracle


def test_from_nothing_to_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="train it"):
        next(rows(1, tmp_path))
    main(
        ["--folder", str(tmp_path), "--steps", "2", "--rows", "4", "--walks", "6", "--verifying", "2", "--threads", "1", "--episodes", "3"]
    )
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["suite"], row["condition"], row["n"]) for row in told] == [("navigation", "backbone", 3), ("navigation", "verified", 3)]
    for row in told:
        assert 0 <= row["ci_low"] <= row["success"] <= row["ci_high"] <= 1 and row["success"] <= row["oracle"]
