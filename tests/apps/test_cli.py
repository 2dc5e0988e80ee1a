"""The command line as a person meets it: real processes for what only a process shows, `main` for the rest."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import PIL.Image
import pytest

from mmsdk.apps import cli
from mmsdk.apps.arguments import COMMANDS
from mmsdk.apps.cli import main

MMSDK = [sys.executable, "-m", "mmsdk.apps.cli"]


@pytest.fixture
def picture(tmp_path: Path) -> str:
    path = tmp_path / "a picture é.png"
    PIL.Image.new("RGB", (8, 8)).save(path)
    return str(path)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["askk"], "did you mean 'ask'"),
        (["ask", "a.png", "what?", "--modle", "mini"], "did you mean '--model'"),
        (["bench", "mini", "--commited"], "did you mean '--committed'"),
        (["ask", "a.png", "what?", "--max-tokens", "many"], "invalid int value"),
        (["ask"], "are required"),
        (["ask", "--hepl"], "does not know '--hepl'; did you mean '--help'"),
        (["imagine", "red", "--modle=x"], "did you mean '--model'"),
        (["weights", "pul"], "pull"),
        (["qqqq"], "there are ask"),
        (["--frobnicate"], "does not know '--frobnicate'"),
        (["--verison"], "did you mean '--version'"),
        (["methods", "--jsn"], "did you mean '--json'"),
        (["doctor", "now"], "does not know 'now'"),
        (["ask", "a.png", "--seed", "1", "what?", "--quick"], "does not know '--quick'"),
        (["ask", "a.png", "what?", "--seed"], "expected one argument"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert hint in shown.err and shown.err.count("\n") == 1 and shown.out == ""
    assert main([*words, "--json"]) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"].keys() == {"type", "message", "item"} and "Error" in json.loads(shown.out)["error"]["type"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["ask", "missing.png", "what is it?"], "missing.png"),
        (["ask", "what is it?"], "no picture or clip was named, and mini answers about what it sees (a model that reads text alone"),
        (["imagine", "red"], "--model: no video model comes with mmsdk yet: train one with `python -m mmsdk.apps.train_video`"),
        (["ask", "PICTURE"], "last argument is the question"),
        (["ask", "what is it?", "PICTURE"], "last argument is the question"),
        (["ask", "what is it?", "missing.png"], "the question comes last"),
        (["ask", "PICTURE", "what", "is", "it?"], "in quotes"),
        (["ask", "PICTURE", "  "], "question is empty"),
        (["ask", "PICTURE", "caf\udce9?"], "UTF-8"),
        (["ask", __file__, "what?"], "not a picture or a clip"),
        (["ask", ".", "what?"], "a folder"),
        (["ask", "/dev/null", "what?"], "a device"),
        (["ask", os.devnull + "/x", "what?"], "no such file"),
        (["ask", "https://example.org/a.png", "what?"], "download it first"),
        (["ask", "data:image/png;base64,!!", "what?"], "data URI"),
        (["ask", "file:///etc/hostname", "what?"], "pass the path itself"),
        (["ask", "PICTURE", "what?", "--explain", "out.unknown"], ".unknown"),
        (["ask", "PICTURE", "what?", "--explain", "out.psd"], ".psd"),
        (["ask", "PICTURE", "what?", "--explain", "nowhere/out.png"], "nowhere"),
        (["ask", "PICTURE", "what?", "--explain", "FOLDER"], "is a folder"),
        (["ask", "PICTURE", "what?", "--explain", "PICTURE"], "one of the pictures that are asked about"),
        (["ask", "PICTURE", "what?", "--compress", "unifrom:64"], "nothing is called 'unifrom' here; did you mean 'uniform'? there is "),
        (["ask", "PICTURE", "--compress", "unifrom:64", "what?"], "uniform"),
        (["ask", "--compress", "unifrom:64", "PICTURE", "PICTURE", "--seed", "3", "what?"], "uniform"),
        (["ask", "PICTURE", "what?", "--compress", "uniform:0"], "at least one|outside"),
        (["ask", "PICTURE", "what?", "--compress", "fastv:0.5", "--compress", "tome:0.5"], "in this order"),
        (["ask", "PICTURE", "what?", "--model", "minni"], "did you mean 'mini'"),
        (["ask", "PICTURE", "what?", "--model", "gigantic"], "known by name:"),
        (["ask", "PICTURE", "what?", "--model", "FOLDER"], "its family is unknown"),
        (["ask", "PICTURE", "what?", "--compress", "uniform"], "how much to keep"),
        (["ask", "PICTURE", "what?", "--compress", "random:0.25,sed=1"], "did you mean 'seed'"),
        (["ask", "PICTURE", "what?", "--dtype", "float31"], "float32"),
        (["ask", "PICTURE", "what?", "--device", "meta"], "meta"),
        (["ask", "PICTURE", "what?", "--max-tokens", "0"], "max_tokens"),
        (["ask", "PICTURE", "what?", "--temperature", "nan"], "temperature"),
        (["ask", "PICTURE", "what?", "--seed", "-1"], "seed"),
        (["demo", "--write", "--out", "PICTURE"], "another folder"),
        (["weights", "list", "maxi"], "there are mini, emoji"),
        (["weights", "verify", "maxi"], "there are mini, emoji"),
        (["weights", "pull", "maxi"], "there are mini, emoji"),
        (["ask", "PICTURE", "what?", "--device", "cuda:99"], "device: torch sees no 'cuda:99' here; this machine has cpu"),
        (["ask", "PICTURE", "what?", "--schema", "nowhere.json"], "nowhere.json: the schema cannot be read: No such file or directory\n"),
        (["ask", "PICTURE", "what?", "--kv", "snapvk:0.5"], "did you mean 'snapkv'"),
        (["chat", "https://example.org/a.png"], "download it first"),
        (["chat", "file:///etc/hostname"], "pass the path itself"),
        (["bench", "minni"], "nothing is called 'minni' here; did you mean 'mini'? there is "),
        (["bench", "minni:64"], "nothing is called 'minni' here; did you mean 'mini'? there is "),
        (["bench", "mini:64"], "not of the form knob=value"),
        (["bench", "minni", "--committed"], "nothing is called 'minni' here; did you mean 'mini'? there is "),
        (["bench", "startup:repeats=2", "--committed"], "leave them out"),
    ],
)
def test_wrong_inputs_name_the_item_and_exit_2(
    words: list[str], hint: str, picture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder.png"
    folder.mkdir()
    named = {"PICTURE": picture, "FOLDER": str(folder)}
    assert main([named.get(word, word) for word in [*words, "--json"]]) == 2
    shown = capsys.readouterr()
    assert any(part in shown.err for part in hint.split("|")) and "Traceback" not in shown.err
    assert shown.err == f"mmsdk: {json.loads(shown.out)['error']['message']}\n"


def test_an_error_as_json_names_its_item(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "missing.png", "what is it?", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["type"], error["item"]) == ("InputError", "missing.png") and "no such file" in error["message"]


def test_help_comes_at_once_and_names_every_option() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = subprocess.run([*MMSDK, "ask", "--help"], capture_output=True, text=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # computing time, since the clock on the wall also counts what else the machine does
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    assert shown.startswith('usage: mmsdk ask [PATH ...] "question"')
    assert "(default: )" not in shown and "(default: inf)" not in shown and "(default: 128)" in " ".join(shown.split())
    for option in ("--model", "--max-tokens", "--temperature", "--seed", "--compress", "--json", "--explain"):
        assert option in shown


def test_no_command_has_a_default_that_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert "(default: )" not in shown and "(default: inf)" not in shown
        assert command != "imagine" or "(default: mini)" not in shown


def test_help_says_what_an_amount_of_compression_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["ask", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for told in ('a count of them ("uniform:64")', 'a share, written with a point ("simplecluster:0.25")', "auto@prefill<200ms"):
        assert told in shown


@pytest.mark.parametrize("code", ["import mmsdk", "import mmsdk.apps.cli"])
def test_light_imports_leave_torch_alone(code: str) -> None:
    heavy = "torch", "transformers", "numpy", "PIL", "cv2"
    probe = f"import sys; {code}; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_interrupt_is_clean() -> None:
    """Ctrl-C while a command imports or works: exit 130, no traceback."""
    # a subprocess of a process that ignores SIGINT would ignore it too, so the default handler is set first
    code = """
import signal, sys, time
from mmsdk.apps import cli
signal.signal(signal.SIGINT, signal.default_int_handler)
cli._parse = lambda argv: (print("up", flush=True), time.sleep(60))
sys.exit(cli.main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in error and "interrupted" in error


def test_a_reader_that_leaves_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*MMSDK, "methods"], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.returncode == 141 and done.stderr == ""


def test_a_full_disk_is_one_line_and_exit_1() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("writes to /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run([*MMSDK, "methods"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "space" in done.stderr


def test_without_an_output_nothing_fails() -> None:
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *MMSDK, "methods"], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_letters_that_a_terminal_lacks_are_written_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    monkeypatch.setattr(cli, "_run", lambda words: print("café 🧿") or 0)
    assert main([]) == 0
    assert terminal.getvalue() == b"caf\\xe9 \\U0001f9ff\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("mmsdk ")
