"""Ctrl-C from the first moments of a real process on: one word, exit 130, whatever is being imported just then."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mmsdk.apps.interrupts import interruptible, leaving_at_once
from mmsdk.vla.unwaited import POLICY_THREAD

ROOT = Path(__file__).parents[2]
SCRIPT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]["mmsdk"]
MODULE, _, FUNCTION = SCRIPT.partition(":")
# What the installed command runs. A process that ignores SIGINT hands that on to its children, so the default handler is set first.
CODE = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from {MODULE} import {FUNCTION}
sys.exit({FUNCTION}())
"""


def interrupted_at(module: str, words: list[str]) -> tuple[int, str, list[str]]:
    """Press Ctrl-C as soon as a module has been imported: exit code, stdout, and the lines on stderr that are not Python's own account."""
    command = [sys.executable, "-X", "importtime", "-c", CODE, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        for line in process.stderr:
            if line.startswith("import time:") and line.rsplit("|", 1)[1].strip() == module:
                break
        else:
            pytest.fail(f"{module} was not imported")
        process.send_signal(signal.SIGINT)
        rest = [line.strip() for line in process.stderr if not line.startswith("import time:")]
        shown = process.stdout.read()
    return process.returncode, shown, [line for line in rest if line]


@pytest.mark.parametrize("module", ["argparse", "difflib", "numpy.exceptions", "torch.types", "mmsdk.weights.fetch"])
def test_ctrl_c_while_modules_are_imported_is_one_word(module: str, tmp_path: Path) -> None:
    (tmp_path / "picture.png").touch()
    code, shown, told = interrupted_at(module, ["ask", str(tmp_path / "picture.png"), "What is it?"])
    assert (code, shown, told) == (130, "", ["interrupted"])
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


def test_who_has_ctrl_c_ignored_keeps_it_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        leaving_at_once()
        with interruptible():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_that_works_is_interrupted_by_an_exception() -> None:
    """It may hold locks and half a file, so it is not ended at once; when it is done, the process is."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        leaving_at_once()
        outside = signal.getsignal(signal.SIGINT)
        assert outside is not signal.default_int_handler
        with pytest.raises(KeyboardInterrupt), interruptible():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is outside
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("name", "told"), [(POLICY_THREAD, "said"), ("policy", "said end")])
def test_the_end_does_not_wait_for_a_policy_at_work_and_loses_nothing_that_was_said(name: str, told: str) -> None:
    """The interpreter's own end, which would stop it in the midst of compiled code, has no part in it."""
    code = f"""
import atexit, sys, threading
from mmsdk.apps.interrupts import end
atexit.register(print, "end")
threading.Thread(target=threading.Event().wait, name={name!r}, daemon=True).start()
print("said", end=" ")
sys.exit(end(3))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (3, told, "")
