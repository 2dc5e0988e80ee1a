"""Plain mistakes of a command line, told by real processes before anything heavy is imported."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mmsdk.apps.arguments import MODEL
from mmsdk.apps.beforehand import check_named
from mmsdk.errors import InputError
from mmsdk.families import NAMED
from mmsdk.named import nowhere

# what a command imports is there when it has ended
PROBE = "import sys; from mmsdk.apps.cli import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules, file=sys.stderr)"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["serve", "--port", "99999"], "port: 99999 is no port; there are 0 (any free one) to 65535"),
        (["serve", "--port", "TAKEN"], "127.0.0.1:TAKEN: cannot listen there: Address already in use"),
        (["serve", "--api-key-file", "nokey.txt"], "nokey.txt: cannot be read: No such file or directory"),
        (["serve", "--api-key-file", "empty.txt"], "empty.txt: it is empty; write a key on each line"),
        (["demo", "--port", "-1"], "port: -1 is no port; there are 0 (any free one) to 65535"),
        (["robot", "serve", "policy.py:arm", "--port", "99999"], "port: 99999 is no port; there are 0 (any free one) to 65535"),
        (["robot", "serve", "policy.py:arm", "--api-key-file", "."], ".: cannot be read: Is a directory"),
        (["robot", "serve", "policy.py:arm"], "policy.py: there is no such file"),
        (["robot", "replay", "folder", "--session", "a/arm.py:arm"], "a/arm.py: there is no such file"),
        (
            ["ask", "nope.png", "x"],
            "nope.png: there is no such file; the question comes last, as one word in quotes; write: mmsdk ask PATH",
        ),
        (["ask", "photo.jpg"], "photo.jpg: the last argument is the question, and this is a file; write: mmsdk ask PATH"),
        (["ask", "what?"], "what?: no picture or clip was named, and mini answers about what it sees ("),
        (["ask", "https://example.org/a.png", "what?"], "https://example.org/a.png: addresses are not fetched from here"),
        (["ask", "photo.jpg", "what?", "--schema", "no.json"], "no.json: the schema cannot be read: No such file or directory"),
        (["chat", "nope.png"], "nope.png: there is no such file"),
        (["ask", "photo.jpg", "what?", "--explain", "out.doc"], "out.doc: '.doc' names no format to draw in; there are .png, .jpg"),
        (["ask", "photo.jpg", "what?", "--explain", "no/out.png"], "no/out.png: the folder no is not there; make it first"),
        (["ask", "what?", "--model", "org/model", "--explain", "o.png"], "--explain: it draws what was looked at, and no picture"),
        (["ask", "photo.jpg", "what?", "--gguf-file", "empty.txt"], "empty.txt: mini brings its own language model; leave --gguf-file out"),
        (["chat", "--model", ".", "--gguf-file", "no.gguf"], "no.gguf: there is no such file, neither here nor in ."),
        (
            ["serve", "--model", ".", "--gguf-file", "empty.txt", "--port", "0"],
            "empty.txt: it is no GGUF file: it does not begin",
        ),
        (["ask", "photo.jpg", "what?", "--adapter", "no/such/place"], "no/such/place: there is no such folder; an adapter is a folder"),
        (["ask", "photo.jpg", "what?", "--adapter", "../place"], "../place: there is no such folder; an adapter is a folder"),
        (["chat", "--adapter", "a=."], ".: it has no adapter_config.json; an adapter is a folder that PEFT saved"),
        (["serve", "--adapter", "a=o/a", "--adapter", "a=o/b", "--port", "0"], "a=o/b: two adapters are called 'a'; write NAME=PATH"),
        (["imagine", "a ball", "--model", "build/no/model"], "there is no folder 'build/no/model': train one with `python -m"),
        (["imagine", "a ball"], "--model: no video model comes with mmsdk yet: train one with"),
        (["demo", "--video-model", "/no", "--port", "0"], "there is no folder '/no': train one with"),
        (["ros", "run", "--params", "no.yaml"], "no.yaml: cannot be read: No such file or directory"),
    ],
)
def test_plain_mistakes_are_told_before_torch_is_imported(words: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    (tmp_path / "empty.txt").touch()
    with socket.create_server(("127.0.0.1", 0)) as door:
        taken = str(door.getsockname()[1])
        command = [sys.executable, "-c", PROBE, *(word.replace("TAKEN", taken) for word in words), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    message = json.loads(done.stdout)["error"]["message"]
    assert message.startswith(told.replace("TAKEN", taken))
    assert done.stderr == f"mmsdk: {message}\n2 False\n"


def test_what_only_opening_it_tells_is_left_to_it(tmp_path: Path) -> None:
    for path in ("data:,x", str(tmp_path), "a" * 5000, "a\0b", "/dev/null/x"):
        check_named(path)
    with pytest.raises(InputError, match="no such file"):
        check_named(str(tmp_path / "none.png"))


def test_models_that_are_named_are_those_that_see() -> None:
    assert MODEL.said == NAMED


@pytest.mark.parametrize("path", ["../x", "./x", "~/no/x", "~/no-x", "~no-such-user/x", "/no-x", "x/", "x/..", "x"])
def test_what_looks_like_a_path_is_no_name_on_the_hub(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert nowhere(path) and not nowhere("org/name") and not nowhere("../here")
