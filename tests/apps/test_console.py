"""Tables: a row a line for programs, no line longer than the terminal for people."""

import os
import sys

import pytest

from mmsdk.apps.console import NARROWEST, Cell, busy, table, terminal_width

ROWS: list[dict[str, Cell]] = [
    {"name": "first", "n": 3, "share": 0.12345, "about": "a sentence that goes on for longer than a terminal is wide"},
    {"name": "second", "n": 120, "share": None, "about": "short"},
]


def test_a_row_is_a_line_and_numbers_stand_to_the_right() -> None:
    assert table(ROWS).splitlines() == [
        "name      n  share  about",
        "first     3  0.123  a sentence that goes on for longer than a terminal is wide",
        "second  120      -  short",
    ]


def test_the_widest_column_is_wrapped_to_the_terminal() -> None:
    assert table(ROWS, 45).splitlines() == [
        "name      n  share  about",
        "first     3  0.123  a sentence that goes on",
        "                    for longer than a",
        "                    terminal is wide",
        "second  120      -  short",
    ]
    assert table(ROWS, 200) == table(ROWS)


@pytest.mark.parametrize("width", [1, 30, 45, 60])
def test_nothing_is_lost_and_no_column_is_wrapped_to_nothing(width: int) -> None:
    drawn = table(ROWS, width)
    assert "".join(drawn.split()) == "".join(table(ROWS).split())
    assert max(map(len, drawn.splitlines())) <= max(width, len("second  120  0.123  ") + NARROWEST)


def test_nothing_is_drawn_of_nothing() -> None:
    assert table([]) == "" == table([], 80)


def test_a_person_at_a_terminal_is_told_what_takes_a_while(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with busy("loading"):
        pass
    assert capsys.readouterr().err == ""
    reader, writer = os.openpty()
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as terminal:
        patch.setattr(sys, "stderr", terminal)
        with busy("loading"):
            assert os.read(reader, 100) == b"loading ..."
        assert os.read(reader, 100) == b"\r" + b" " * len("loading ...") + b"\r"
        patch.setattr(sys, "stderr", None)
        with busy("loading"):
            pass
    os.close(reader)


def test_only_a_terminal_has_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal_width() is None
    monkeypatch.setenv("COLUMNS", "70")
    reader, writer = os.openpty()
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as terminal:
        patch.setattr(sys, "stdout", terminal)
        assert terminal_width() == 70
        patch.setattr(sys, "stdout", None)
        assert terminal_width() is None
    os.close(reader)
