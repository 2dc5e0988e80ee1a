"""`mmsdk chat` on mini's parts at a small size, with the real tokenizer: from a pipe, and as if somebody typed."""

import io
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from mmsdk.apps.cli import main
from mmsdk.apps.talk import Talk
from mmsdk.errors import InputError
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline, pipeline

MEDIA = Path(__file__).parents[2] / "apps" / "media"
COMMAND = ["chat", "--max-tokens", "3"]


@pytest.fixture
def words(small: Mini, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command with short answers, over a model that is there already."""
    monkeypatch.setattr(sys.modules[pipeline.__module__], "open_model", lambda *asked: small)
    return COMMAND


class Typed(io.StringIO):
    """A terminal at which lines are typed; Ctrl-C where one says so."""

    def isatty(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> str:
        line = super().readline()
        if line.strip() == "^C":
            raise KeyboardInterrupt
        return line


class Impatient(io.StringIO):
    """A reader who presses Ctrl-C as the first answer begins."""

    pressed = False

    def write(self, text: str, /) -> int:
        if text.strip() and not text.startswith(">") and not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt
        return super().write(text)


def heard(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """These lines come through a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))


def objects(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return list(map(json.loads, capsys.readouterr().out.splitlines()))


LINES = """
import fcntl, signal, termios
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs, tests among them, ignore it
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from mmsdk.apps.commands.chat import _lines
for line in _lines():
    print("got", line, flush=True)
"""


def test_ctrl_c_takes_a_half_typed_line_away_and_at_an_empty_one_ends(tmp_path: Path) -> None:
    """At a real terminal, whose driver makes a signal of the key."""
    pytest.importorskip("readline")
    terminal, theirs = os.openpty()
    environment = {**os.environ, "TERM": "dumb", "INPUTRC": os.devnull}
    command = [sys.executable, "-c", LINES]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment)
    os.close(theirs)
    try:
        until(terminal, b"> ")
        os.write(terminal, b"half")
        until(terminal, b"half")
        pressed(terminal, b"> ")
        os.write(terminal, b"whole\n")
        told = until(terminal, b"got whole\r\n")
        assert b"half" not in told
        until(terminal, b"> ")
        pressed(terminal, b"KeyboardInterrupt")
        assert process.wait(60)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def pressed(terminal: int, wanted: bytes) -> None:
    """Press Ctrl-C, again where no more comes of it than its echo: Python overlooks a signal between its prompt and its wait for a key."""
    content = b""
    for _ in range(12):
        os.write(terminal, b"\x03")
        while select.select([terminal], [], [], 5)[0]:
            content += os.read(terminal, 1)
            if content.endswith(wanted):
                return
    raise AssertionError(content)


def until(terminal: int, wanted: bytes) -> bytes:
    """What comes from a terminal up to these letters, for a minute at most."""
    content = b""
    while wanted not in content:
        assert select.select([terminal], [], [], 60)[0], content
        content += os.read(terminal, 1)
    return content


def test_lines_of_a_pipe_are_answered_one_object_each(
    words: list[str], photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    coffee, rocket = str(photos / "coffee.png"), str(photos / "rocket.jpg")
    lines = ["What is on the table?", "", "/unod", "And beside it?", "/undo", f"/image {rocket}", "/image nowhere.png", "//What is this?"]
    heard(monkeypatch, *lines, "/system Be brief.", "/quit", "Never read.")
    assert main([*words, coffee, "--json", "--logprobs", "2", "--temperature", "0.5", "--seed", "3"]) == 2
    shown = capsys.readouterr()
    first, unknown, second, missing, third = map(json.loads, shown.out.splitlines())
    assert set(first) == {"text", "model", "tokens", "timings_ms", "seed", "finish", "logprobs"} and first["seed"] == 3
    assert len(first["logprobs"]) == first["tokens"]["generated"] and len(first["logprobs"][0]["top"]) == 2
    assert unknown["error"]["item"] == "/unod" and "did you mean '/undo'" in unknown["error"]["message"]
    assert missing["error"]["item"] == "nowhere.png"
    assert second["tokens"]["recalled"] >= first["tokens"]["prompt"] and second["tokens"]["visual"] == first["tokens"]["visual"]
    # the second question is forgotten, and there is a second picture behind the first
    assert third["tokens"]["visual"] > first["tokens"]["visual"] and third["tokens"]["recalled"] > first["tokens"]["visual"]
    told = [line for line in shown.err.splitlines() if line.startswith("(")]
    assert told == ["(forgotten: And beside it?)", f"({rocket} goes with the next question)", "(told before the conversation)"]
    assert shown.err.count("\n") == 5 and "Never" not in shown.out


def test_commands_of_a_pipe_say_what_they_did(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard(monkeypatch, "/turns", "/undo", "What?", "And?", "/drop 1", "/undo", "/turns", "/drop 1")
    assert main(words) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("(", "mmsdk:"))]
    refused = "mmsdk: turn: nothing was asked yet"
    assert [line.partition(", so ")[0] for line in told] == [
        "(nothing was asked yet)", refused, "(forgotten: What?)", "(forgotten: And?)", "(nothing was asked yet)", refused,
    ]  # fmt: skip


def test_turns_are_edited_dropped_listed_and_saved(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, scene, clip = tmp_path / "talk.json", MEDIA / "scene.png", MEDIA / "motion.mp4"
    asked = [f"/image {scene}", "What is it?", f"/video {clip}", "What happens?", "And then?"]
    changed = ["/turns", "/edit 2 What goes on?", "/drop 1", f"/save {saved}", "Why?", f"/save {saved}", "/system Be brief.", "/turns"]
    heard(monkeypatch, *asked, *changed)
    assert main([*words, "--json"]) == 0
    first, happens, _, before, edited, why, after = objects(capsys)
    assert [turn["question"] for turn in before["turns"]] == ["What is it?", "What happens?", "And then?"]
    assert [len(turn["shown"]) for turn in before["turns"]] == [1, 1, 0] and before["turns"][0]["answer"] == first["text"]
    # the clip is asked about again, the picture before it is known, and what came behind is gone
    assert edited["tokens"]["visual"] == happens["tokens"]["visual"] and edited["tokens"]["recalled"] >= happens["tokens"]["visual"]
    assert [turn["question"] for turn in after["turns"]] == ["What goes on?", "Why?"]
    kept = json.loads(saved.read_text())
    assert kept["turns"] == after["turns"] and kept["turns"][1]["answer"] == why["text"] and kept["system"] == ""
    elsewhere = ["/image https://example.org/a.png", "/video file:///a.mp4", f"/save {tmp_path / 'nowhere' / 'talk.json'}"]
    heard(
        monkeypatch, "What?", f"/save {saved}", "/edit 2 What?", "/edit What?", "/drop 0", "/drop", "/video", "/save", *elsewhere, "/undo",
        "/undo", "/drop -1",
    )  # fmt: skip
    assert main([*words, "--json"]) == 2
    errors = [one["error"] for one in objects(capsys)[1:]]
    items = [str(saved), "turn", "turn", "turn", "turn", "/video", "/save", *(line.partition(" ")[2] for line in elsewhere), "turn", "turn"]
    assert [error["item"] for error in errors] == items
    assert "such a file already" in errors[0]["message"] and "there is no turn 2; there is one, and it is turn 1" in errors[1]["message"]
    assert "download it first" in errors[7]["message"] and "pass the path itself" in errors[8]["message"]
    assert errors[9]["message"].endswith("it cannot be written: No such file or directory") and ".part" not in errors[9]["message"]
    assert all("nothing was asked yet" in error["message"] and "-1" not in error["message"] for error in errors[10:])
    assert json.loads(saved.read_text()) == kept


def test_a_write_that_breaks_off_leaves_nothing_and_can_be_tried_again(small: Mini, tmp_path: Path) -> None:
    """No file, or the one that was there; the system itself breaks the write off, at its limit of the length of files."""
    resource = pytest.importorskip("resource")
    saved, talk = tmp_path / "talk.json", Talk(Pipeline(small).chat(), small, as_objects=False)

    def broken() -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
        try:
            with pytest.raises(InputError, match="cannot be written"):
                talk.take(f"/save {saved}")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    broken()
    assert list(tmp_path.iterdir()) == []
    talk.take(f"/save {saved}")
    before = saved.read_text()
    talk.take("/system Be brief.")
    broken()
    assert saved.read_text() == before and list(tmp_path.iterdir()) == [saved]
    talk.take(f"/save {saved}")
    assert json.loads(saved.read_text())["system"] == "Be brief."


def test_answers_have_the_form_that_was_asked_for(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "form.json").write_text('{"type": "boolean"}', encoding="utf-8")
    lines = ["Which?", "/regex [a-c]{2}", "And?", f"/schema {tmp_path / 'form.json'}", "Is it?", "/free", "Say on.", "/regex (", "/choice"]
    heard(monkeypatch, *lines, "/schema nowhere.json", "Still?")
    assert main([*words, "--json", "--choice", "a cow, a red cup", "--max-tokens", "8"]) == 2
    chosen, matched, judged, free, *wrong, still = objects(capsys)
    assert chosen["text"] in ("a cow", "a red cup") and len(matched["text"]) == 2 and set(matched["text"]) <= set("abc")
    assert type(json.loads(judged["text"])) is bool and free["tokens"]["generated"] == still["tokens"]["generated"] == 8
    assert [one["error"]["item"] for one in wrong] == ["regex", "/choice", "nowhere.json"]


def test_a_line_in_another_encoding_is_one_error(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = b"What?\n" + "Wo ist die Tür?\n".encode("latin-1") + "Wo ist die Tür?\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    assert main([*words, "--json"]) == 2
    first, wrong, last = objects(capsys)
    assert first["text"] and last["text"] and wrong["error"]["type"] == "InputError" and "UTF-8" in wrong["error"]["message"]


def test_ctrl_c_stops_an_answer_and_at_the_prompt_the_command(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Typed("Say on.\nWhat?\n/help\n/undo\n/undo\n^C\n"))
    monkeypatch.setattr(sys, "stdout", Impatient())
    assert main(words) == 130
    told = capsys.readouterr().err
    assert "stopped; the conversation is as it was" in told and "forgotten: What?" in told and told.endswith("interrupted\n")
    assert "nothing was asked yet" in told and "/edit N QUESTION" in told


def test_what_is_wrong_with_the_command_is_told_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard(monkeypatch)
    for wrong, item in (
        (["nowhere.png"], "nowhere.png"),
        (["--top-p", "2"], "top_p"),
        (["--repetition-penalty", "0"], "repetition_penalty"),
        (["--regex", "("], "regex"),
        (["--schema", "nowhere.json"], "nowhere.json"),
    ):
        assert main(["chat", *wrong, "--model", "there/is-none"]) == 2
        assert item in capsys.readouterr().err
