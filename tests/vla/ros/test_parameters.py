"""Parameter files by ROS's rules, and values that are checked before they count."""

from math import inf
from pathlib import Path

import pytest

from mmsdk.errors import InputError
from mmsdk.vla.ros.parameters import Parameter, Parameters, load_parameters, parse_parameters

# the forms that ROS 2's documentation shows: wildcards, namespaces nested and in one name, names with dots
FILE = """
/**:
  ros__parameters:
    rate: 10.0
    everywhere: true
/*:
  ros__parameters: {level: root}
/arm/*:
  ros__parameters: {level: arm}
/**/policy:
  ros__parameters: {deep: 1}
arm:
  policy:
    ros__parameters:
      rate: 20.0
      cameras:
        front: {topic: /front, size: [480, 640]}
      names.first: [a, b]
policy:
  ros__parameters: {rate: 30.0}
/**/other:
  ros__parameters: {rate: 99.0}
"""


def test_the_nodes_own_name_wins_over_wildcards() -> None:
    assert parse_parameters(FILE, "/arm/policy") == {
        "rate": 20.0,
        "everywhere": True,
        "level": "arm",
        "deep": 1,
        "cameras.front.topic": "/front",
        "cameras.front.size": (480, 640),
        "names.first": ("a", "b"),
    }
    assert parse_parameters(FILE, "policy") == {"rate": 30.0, "everywhere": True, "level": "root", "deep": 1}
    assert parse_parameters(FILE, "/a/b/c") == {"rate": 10.0, "everywhere": True}
    # a wildcard further down in the file is a wildcard all the same
    assert parse_parameters(FILE + "/**/arm/policy:\n  ros__parameters: {rate: 5.0}\n", "/arm/policy")["rate"] == 20.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("policy: {ros__parameters: {a: 1, a: 2}}", "'a' stands there twice"),
        ("policy: {ros__parameters: {a.b: 1, a: {b: 2}}}", "a.b stands there twice"),
        ("policy: {rate: 1}", "parameters stand under ros__parameters"),
        ("rate: 1", "parameters stand under ros__parameters"),
        ("policy: {ros__parameters: {a: null}}", "a is None, expected a value"),
        ("policy: {ros__parameters: {a: [1, [2]]}}", r"a is \[1, \[2\]\]"),
        ("policy: {ros__parameters: {a: 2020-01-01}}", "expected a value"),
        ("a: &x {ros__parameters: {b: 1}}\npolicy: *x", "aliases"),
        ("- 1", "expected node names"),
        ("", "expected node names"),
        ("a: [", "not YAML"),
        ("a: !!python/object/apply:os.system [id]", "not YAML"),
    ],
)
def test_broken_files_are_refused(text: str, told: str) -> None:
    with pytest.raises(InputError, match=f"robot.yaml.*: .*{told}"):
        parse_parameters(text, "policy", "robot.yaml")


def test_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "robot.yaml"
    path.write_text(FILE, encoding="utf-8")
    assert load_parameters(path, "/policy")["rate"] == 30.0
    with pytest.raises(InputError, match=r"nothing.yaml: cannot be read"):
        load_parameters(tmp_path / "nothing.yaml", "/policy")


DECLARED = (
    Parameter("rate", "double", 20.0, "Hz", low=1.0, high=100.0),
    Parameter("steps", "integer", 10, low=1.0),
    Parameter("topic", "string", read_only=True),
    Parameter("safety", "string", "hold", choices=("hold", "zeros", "none")),
    Parameter("debug", "bool", False),
    Parameter("names", "string_array", ()),
    Parameter("gains", "double_array", (1.0,), low=0.0),
)


def test_values_are_what_was_declared() -> None:
    found = Parameters(DECLARED, {"topic": "/cmd", "rate": 30, "names": ["a", "b"], "gains": [1, 2.5]})
    assert (found.number("rate"), found.number("steps"), found.text("topic"), found.text("safety")) == (30.0, 10, "/cmd", "hold")
    assert (found.flag("debug"), found.texts("names"), found.numbers("gains")) == (False, ("a", "b"), (1.0, 2.5))
    with pytest.raises(InputError, match="rate: is double, asked for as string"):
        found.text("rate")
    with pytest.raises(InputError, match="speed: is not declared"):
        found.number("speed")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rate": "20"}, "rate: expected double, got '20'"),
        ({"rate": "1e-3"}, "write 1.0e-3"),
        ({"rate": True}, "rate: expected double, got True"),
        ({"rate": 0.5}, r"rate: 0.5 lies outside of 1..100"),
        ({"rate": float("nan")}, "rate: nan lies outside"),
        ({"steps": 1.0}, "steps: expected integer, got 1.0"),
        ({"steps": True}, "steps: expected integer"),
        ({"steps": 2**63}, "does not fit into 64 bits"),
        ({"debug": 1}, "debug: expected bool"),
        ({"safety": "slam"}, "safety: 'slam' is none of hold, zeros, none"),
        ({"names": "a"}, "names: expected a list of string"),
        ({"names": ["a", 1]}, r"names\[1\]: expected string, got 1"),
        ({"gains": (1.0, -1.0)}, r"gains\[1\]: -1 lies outside of 0..inf"),
        ({"rat": 1.0}, "rat: is not declared; did you mean rate"),
        ({"rate": 10**400}, "rate: expected double"),
    ],
)
def test_wrong_values_change_nothing(given: dict[str, object], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Parameters(DECLARED, {"topic": "/cmd", **given})
    found = Parameters(DECLARED, {"topic": "/cmd"})
    with pytest.raises(InputError, match=told):
        found.set({"debug": True, **given})
    assert not found.flag("debug") and found.number("rate") == 20.0


def test_what_has_no_default_must_be_given_and_what_is_read_only_stays() -> None:
    with pytest.raises(InputError, match="parameters: topic missing"):
        Parameters(DECLARED, {})
    found = Parameters(DECLARED, {"topic": "/cmd"})
    with pytest.raises(InputError, match="topic cannot be changed while the node runs"):
        found.set({"rate": 50.0, "topic": "/other"})
    assert found.number("rate") == 20.0
    found.set({"rate": 50.0, "debug": True})
    assert found.number("rate") == 50.0 and found.flag("debug")


def test_declarations_are_checked_too() -> None:
    with pytest.raises(InputError, match="rate: 0 lies outside of 1..inf"):
        Parameter("rate", "double", 0.0, low=1.0)
    with pytest.raises(InputError, match="declared twice"):
        Parameters((DECLARED[0], DECLARED[0]), {})
    assert DECLARED[1].high == inf
