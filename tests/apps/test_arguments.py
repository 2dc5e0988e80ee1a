"""The command line as data and as argparse sees it: every command has --json, and a flag means one thing wherever it stands."""

import argparse
import re
from collections import defaultdict
from pathlib import Path
from typing import get_args

import pytest
import torch

from mmsdk.apps.arguments import COMMANDS
from mmsdk.apps.flags import Flag
from mmsdk.apps.parser import parser
from mmsdk.kv.memory import KINDS
from mmsdk.precision import resolve_dtype
from mmsdk.quant.types import Quantize

CPU = torch.device("cpu")


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parsers of all commands, as argparse has them."""
    (under,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(under.choices)


def flags() -> dict[str, list[Flag]]:
    found: dict[str, list[Flag]] = defaultdict(list)
    for command in COMMANDS.values():
        for flag in command.flags:
            found[flag.name].append(flag)
    return found


def test_every_command_is_a_module_and_every_module_a_command() -> None:
    folder = Path(__file__).parents[2] / "apps" / "commands"
    assert set(COMMANDS) == {path.stem for path in folder.glob("[a-z]*.py")}
    assert {"ask", "demo", "serve", "bench", "methods", "doctor", "weights"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_answer_as_json(name: str) -> None:
    (switch,) = (action for action in parsers()[name]._actions if "--json" in action.option_strings)
    assert (switch.nargs, switch.default) == (0, False)


@pytest.mark.parametrize("name", COMMANDS)
def test_argparse_takes_what_the_data_says(name: str) -> None:
    actions = {action.option_strings[-1]: action for action in parsers()[name]._actions if action.option_strings}
    assert set(actions) == {"--help", *(flag.name for flag in COMMANDS[name].flags)}
    for flag in COMMANDS[name].flags:
        action = actions[flag.name]
        assert action.help is not None and action.help.startswith(flag.about) and action.required == flag.needed
        assert (action.nargs == 0) == (not flag.value) and action.default == (
            [] if flag.repeated else False if not flag.value else flag.default
        )


@pytest.mark.parametrize("name", sorted(flags()))
def test_a_flag_means_one_thing_wherever_it_stands(name: str) -> None:
    """The kind of its value is the same, and so are the words that explain it, but for what one command adds to them."""
    same = flags()[name]
    assert len({(flag.value, flag.kind, flag.repeated) for flag in same}) == 1
    assert len({flag.said for flag in same if flag.said}) <= 1
    told = {flag.about.split("; ")[0] for flag in same}
    assert len({text.rpartition(": ")[2] if text.split(":")[0] in TOLD else text for text in told}) == 1


TOLD = {"play", "serve", "record", "record, export", "export", "replay", "run", "simulate"}
"""What may stand before the words: the actions of a command that a flag belongs to."""


BEHIND = {"play": "TASK", "serve": "FILE.py:NAME", "record": "FILE.py:NAME", "replay": "FOLDER...", "export": "FOLDER..."}


def test_behind_an_action_help_shows_what_can_be_said_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    own = {
        "play": {"--env", "--episodes", "--gif", "--compress"},
        "serve": {"--host", "--port", "--api-key-file"},
        "record": {"--out", "--ticks"},
        "replay": {"--session", "--ask"},
        "export": {"--out", "--pictures"},
    }
    for action, wanted in own.items():
        with pytest.raises(SystemExit, match="0"):
            parser().parse_args(["robot", action, "--help"])
        shown = capsys.readouterr().out
        assert (
            shown.startswith(f"usage: mmsdk robot {action} {BEHIND[action]} [options]\n") and "{play" not in shown and "WHAT" not in shown
        )
        found = {word for word in re.findall(r"^  (--[a-z-]+)", shown, re.M) if word != "--json"}
        assert found == wanted and f"{action}: --" not in shown and "--json" in shown
        assert all(name not in shown.partition("options:")[0] for name in set().union(*own.values()) - wanted)
    with pytest.raises(SystemExit, match="0"):
        parser().parse_args(["robot", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in set().union(*own.values())) and "serve: the port" in shown


def test_models_are_named_alike() -> None:
    """Whoever loads a model takes the same flags for it."""
    for name, command in COMMANDS.items():
        names = {flag.name for flag in command.flags}
        assert "--model" not in names or name in ("demo", "imagine") or {"--compress", "--quantize", "--dtype", "--device"} <= names, name


def test_what_is_offered_is_what_can_be_chosen() -> None:
    offered = {name: same[0].said for name, same in flags().items()}
    assert set(offered["--kv"]) == set(KINDS) and set(offered["--quantize"]) == set(get_args(Quantize))
    assert all(resolve_dtype(name, CPU).is_floating_point for name in offered["--dtype"])
