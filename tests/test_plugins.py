"""Plugins by name, on a folder of plugin files made for the test: what is there is found, and what is wrong says what is near."""

import dataclasses
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from mmsdk import plugins
from mmsdk.errors import PluginError
from mmsdk.plugins import Spec

NUMBERS = count()
PRUNE = '''
"""Prune."""
from dataclasses import dataclass
from typing import Literal

__all__ = ["Prune"]

@dataclass(frozen=True, slots=True)
class Prune:
    """Prune."""
    layer: int
    ratio: float = 0.5
    exact: bool = True
    by: Literal["norm", "attention"] = "norm"
    note: str = ""
    seed: int | None = None
    window: tuple[int, int] = (1, 2)
'''
PLAIN = '''
"""Plain."""
from dataclasses import dataclass

__all__ = ["Plain"]

@dataclass(frozen=True, slots=True)
class Plain:
    """Plain."""
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"plugin_folder_{next(NUMBERS)}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "prune.py").write_text(PRUNE)
    (folder / "plain.py").write_text(PLAIN)
    (folder / "_shared.py").write_text("raise RuntimeError('private files are never imported')")
    (folder / "unnamed.py").write_text('"""No __all__."""\n')
    (folder / "function.py").write_text("__all__ = ['build']\ndef build(): ...\n")
    (folder / "two.py").write_text(PLAIN.replace('["Plain"]', '["Plain", "dataclass"]'))
    (folder / "notes.txt").write_text("not a plugin")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for module in [entry for entry in sys.modules if entry.partition(".")[0] == name]:
        del sys.modules[module]


def test_the_files_of_the_folder_are_the_list(package: str) -> None:
    assert plugins.available(package) == ["function", "plain", "prune", "two", "unnamed"]


def test_a_new_file_is_available_with_no_other_edit(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "fresh.py").write_text(PLAIN)
    assert "fresh" in plugins.available(package)
    assert type(plugins.load(package, "fresh")).__name__ == "Plain"


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("plain", Spec("plain")),
        (" plain ", Spec("plain")),
        ("prune:layer=3", Spec("prune", "", (("layer", "3"),))),
        ("prune: layer = 3 , ratio=.5", Spec("prune", "", (("layer", "3"), ("ratio", ".5")))),
        ("prune:64", Spec("prune", "64")),
        ("prune:0.25,layer=3", Spec("prune", "0.25", (("layer", "3"),))),
        ("prune:note=a:b", Spec("prune", "", (("note", "a:b"),))),
        ("prune:note=a=b", Spec("prune", "", (("note", "a=b"),))),
    ],
)
def test_a_string_is_split_into_name_amount_and_knobs(text: str, spec: Spec) -> None:
    assert plugins.parse(text) == spec


@pytest.mark.parametrize(
    "text", ["", "  ", ":layer=3", "prune:", "prune:layer=3,", "prune:,layer=3", "prune:layer=", "prune:=3", "prune:1,2"]
)
def test_a_string_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(PluginError):
        plugins.parse(text)


def test_a_knob_given_twice_is_refused() -> None:
    with pytest.raises(PluginError, match="'layer' twice"):
        plugins.parse("prune:layer=3,layer=4")


@pytest.mark.parametrize(
    ("text", "knob", "value"),
    [
        ("prune:layer=3", "layer", 3),
        ("prune:layer=-3", "layer", -3),
        ("prune:layer=3,ratio=1e-2", "ratio", 0.01),
        ("prune:layer=3,ratio=1", "ratio", 1.0),
        ("prune:layer=3,exact=false", "exact", False),
        ("prune:layer=3,exact=true", "exact", True),
        ("prune:layer=3,by=attention", "by", "attention"),
        ("prune:layer=3,note=7", "note", "7"),
        ("prune:layer=3,seed=7", "seed", 7),
        ("prune:layer=3,seed=none", "seed", None),
    ],
)
def test_text_becomes_the_type_of_the_field(package: str, text: str, knob: str, value: object) -> None:
    built = plugins.load(package, text)
    assert dataclasses.is_dataclass(built)
    found = dataclasses.asdict(built)[knob]  # type: ignore[arg-type]
    assert found == value
    assert type(found) is type(value)


def test_defaults_stay_where_the_string_is_silent(package: str) -> None:
    built = plugins.load(package, "prune:layer=3")
    assert dataclasses.astuple(built) == (3, 0.5, True, "norm", "", None, (1, 2))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prone", "did you mean 'prune'.*plain"),
        ("zzzz", "nothing is called 'zzzz' here; there is .*plain, prune"),
        ("_shared", "nothing is called '_shared'"),
        ("prune:laier=3", "no knob 'laier'; did you mean 'layer'.*ratio"),
        ("plain:layer=3", "no knob 'layer'; it has none"),
        ("prune", "needs a value for its knob 'layer'"),
        ("prune:64", "'64' is not of the form knob=value"),
        ("prune:layer=3.5", "prune:layer is a whole number; got '3.5'"),
        ("prune:layer=many", "prune:layer is a whole number"),
        ("prune:layer=٣", "prune:layer is a whole number; got '٣'"),
        ("prune:layer=1_0", "prune:layer is a whole number; got '1_0'"),
        ("prune:layer=3,ratio=0.٣", "prune:ratio is a finite number; got '0.٣'"),
        ("prune:layer=3,ratio=half", "prune:ratio is a finite number; got 'half'"),
        ("prune:layer=3,ratio=nan", "prune:ratio is a finite number"),
        ("prune:layer=3,ratio=inf", "prune:ratio is a finite number"),
        ("prune:layer=3,exact=1", "prune:exact is one of true, false; got '1'"),
        ("prune:layer=3,by=size", "prune:by is one of norm, attention; got 'size'"),
        ("prune:layer=3,seed=x", "prune:seed is a whole number"),
        ("prune:layer=3,window=1", "prune:window cannot be written in a string"),
        ("unnamed", "unnamed is no plugin: its __all__ must name exactly one dataclass"),
        ("function", "function is no plugin"),
        ("two", "two is no plugin.*Plain.*dataclass"),
    ],
)
def test_a_wrong_name_knob_or_value_says_what_would_be_right(package: str, text: str, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        plugins.load(package, text)


def test_knobs_are_listed_with_their_defaults(package: str) -> None:
    listed = plugins.knobs(package, "prune")
    assert list(listed) == ["layer", "ratio", "exact", "by", "note", "seed", "window"]
    assert (listed["layer"], listed["ratio"], listed["by"], listed["window"]) == ("required", "0.5", "'norm'", "(1, 2)")


def test_knobs_are_read_without_running_the_file(package: str, tmp_path: Path) -> None:
    fields = "ratio: float = 10 / 64\n    kind: ClassVar[str] = 'x'\n    least: float = -2 * LEAST\n    most: int = found()"
    text = PRUNE.replace("ratio: float = 0.5", fields).replace("@dataclass", "LEAST = 8\n@dataclass")
    (tmp_path / package / "slow.py").write_text(f"{text}\nraise RuntimeError('this file was run')\n")
    listed = plugins.knobs(package, "slow")
    assert list(listed) == ["layer", "ratio", "least", "most", "exact", "by", "note", "seed", "window"]
    assert (listed["ratio"], listed["least"], listed["most"]) == ("0.15625", "-16", "found()")


@pytest.mark.parametrize("name", ["unnamed", "function", "two"])
def test_what_is_no_plugin_has_no_knobs(package: str, name: str) -> None:
    with pytest.raises(PluginError, match=f"{name} is no plugin: its __all__ must name exactly one dataclass"):
        plugins.knobs(package, name)
    with pytest.raises(PluginError, match="did you mean 'plain'"):
        plugins.knobs(package, "plian")


@pytest.mark.parametrize(
    ("wrong", "known", "meant"),
    [
        ("SimpleClutser", ["simplecluster", "uniform"], "simplecluster"),
        ("max_token", ["max_tokens", "min_p"], "max_tokens"),
        ("repeat_penalty", ["repetition_penalty", "top_k"], "repetition_penalty"),
        ("maxtokens", ["max_tokens"], "max_tokens"),
        ("--hots", ["--host", "--port"], "--host"),
        # one word of two is another one
        ("min_tokens", ["max_tokens", "model"], ""),
        ("foo", ["robot", "bench"], ""),
        ("", ["robot"], ""),
    ],
)
def test_what_is_near_is_one_slip_away_and_no_other_word(wrong: str, known: list[str], meant: str) -> None:
    assert plugins.nearest(wrong, known) == meant
    assert plugins.near(wrong, known) == (f"did you mean {meant!r}? " if meant else "")


def test_what_a_plugin_is_about_is_read_without_running_it(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "slow.py").write_text('"""Slow: it takes its time.\n\nMore."""\nraise RuntimeError("this file was run")\n')
    assert plugins.about(package, "slow") == "Slow: it takes its time."
    assert plugins.about(package, "plain") == "Plain." and plugins.about(package, "function") == ""
    with pytest.raises(PluginError, match="did you mean 'plain'"):
        plugins.about(package, "plian")


def test_an_amount_is_left_to_the_caller(package: str) -> None:
    assert dataclasses.is_dataclass(plugins.build(package, plugins.parse("plain:64")))
