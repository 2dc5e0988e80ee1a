"""Tables: no line longer than can be read, and nothing left out for that."""

import fcntl
import os
import re
import select
import struct
import sys
import termios

import pytest

from mmsdk.apps.console import NARROWEST, READABLE, Cell, busy, counted, line_width, table

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
            assert shown(reader, 11) == b"loading ..."
        assert shown(reader, 13) == gone(11)
        for item in counted("reading", "ab"):
            if item == "a":
                assert shown(reader, 42) == b"reading [........................] 0/2 ..."
            else:
                assert shown(reader, 44 + 42) == gone(42) + b"reading [############............] 1/2 ..."
        assert shown(reader, 44) == gone(42)
        patch.setattr(sys, "stderr", None)
        with busy("loading"):
            pass
    os.close(reader)


def gone(letters: int) -> bytes:
    """What takes a line of so many letters away."""
    return b"\r" + b" " * letters + b"\r"


def shown(terminal: int, size: int) -> bytes:
    """So many bytes that were written, which come in as many parts as the terminal likes; fewer where no more come for half a minute."""
    content = b""
    while len(content) < size and select.select([terminal], [], [], 30)[0]:
        content += os.read(terminal, size - len(content))
    return content


def test_words_are_broken_only_where_nothing_else_would_do() -> None:
    path = "/home/somebody/.cache/weights/some-net-0.1.1/net.onnx"
    rows: list[dict[str, Cell]] = [{"about": "a sentence of several words that go on and on", "path": path}]
    assert path in table(rows, 80) and max(map(len, table(rows, 80).splitlines())) <= 80
    assert path not in table(rows, 40) and max(map(len, table(rows, 40).splitlines())) <= 40
    assert "".join(line[NARROWEST:].strip() for line in table(rows, 40).splitlines()[1:]) == path


@pytest.mark.parametrize("width", [20, 60, 100])
def test_names_of_columns_are_broken_behind_underscores_alone(width: int) -> None:
    """However narrow it is; where numbers stand below, a column is no wider than they are or than the longest part of its name."""
    names = ["prefill_x_transformers", "decode_x_llama.cpp", "perplexity", "of", "tokens_per_second"]
    rows: list[dict[str, Cell]] = [dict.fromkeys(names, 1234.5)]
    *head, numbers = table(rows, width).splitlines()
    said = [[line[place.start() : place.end()].strip() for line in head] for place in re.finditer(r" *\S+", numbers)]
    assert ["".join(parts) for parts in said] == names
    assert all(part.endswith("_") for parts in said for part in [one for one in parts if one][:-1])
    assert len(numbers) <= max(width, len("transformers  llama.cpp  perplexity  1234  tokens_"))
    assert width < 100 or len(head) == 1


def test_a_line_is_as_long_as_columns_says_or_a_readable_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, open(os.devnull, "w") as pipe:
        patch.setattr(sys, "__stdout__", pipe)
        for columns in (None, "", "0", "wide"):
            patch.delenv("COLUMNS", raising=False)
            if columns is not None:
                patch.setenv("COLUMNS", columns)
            assert line_width() == READABLE <= 120
        patch.setenv("COLUMNS", "70")
        assert line_width() == 70
        patch.setattr(sys, "__stdout__", None)
        assert line_width() == 70


def test_a_terminal_says_how_long_its_lines_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 67, 0, 0))
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as terminal:
        patch.setattr(sys, "__stdout__", terminal)
        assert line_width() == 67
    os.close(reader)
