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
        (["ask", "what?"], "what?: no picture or clip was named; write: mmsdk ask PATH"),
        (["ask", "https://example.org/a.png", "what?"], "https://example.org/a.png: addresses are not fetched from here"),
        (["ask", "photo.jpg", "what?", "--schema", "no.json"], "no.json: the schema cannot be read: No such file or directory"),
        (["chat", "nope.png"], "nope.png: there is no such file"),
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
