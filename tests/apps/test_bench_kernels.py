"""The bench of kernels, by the command that a person types."""

import json

import pytest

from mmsdk.apps.bench import kernels
from mmsdk.apps.cli import main
from mmsdk.kernels import targets


def test_compiling_alone_gives_resources_and_no_error_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels:op=gather", "--compile-only", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bench"] == "kernels" and "compile_only=true" in result["command"]
    assert [row["target"] for row in result["rows"]] == ["sm_80", "sm_90", "gfx942"]
    for row in result["rows"]:
        assert row["op"] == "gather" and row["registers"] > 0 and row["spills"] == 0 and row["max_abs_err"] is None


def test_running_gives_the_error_of_the_float32_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels:op=swiglu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(0 <= row["max_abs_err"] <= 1e-5 for row in rows)


def test_without_triton_nothing_is_run_and_the_way_to_have_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(targets, "triton", None)
    # what would fail there with a traceback of Triton's absence
    monkeypatch.setattr(kernels, "_errors", lambda chosen: pytest.fail("kernels were run"))
    assert main(["bench", "kernels:op=gather"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and 'pip install ".[kernels]" in the clone' in error


@pytest.mark.parametrize("words", [["kernels:op=gatherr"], ["startup", "--compile-only"]])
def test_what_cannot_be_meant_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and ("gather" in error or "no knob 'compile_only'" in error)
