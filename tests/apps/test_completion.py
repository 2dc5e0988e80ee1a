"""Scripts for shells, run by the shells themselves: what is offered behind each word is what the command line knows."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mmsdk import plugins
from mmsdk.apps.arguments import COMMANDS
from mmsdk.apps.cli import main
from mmsdk.apps.shells import bash, fish, zsh
from mmsdk.weights.bundle import available

METHODS = [f"{name}:" for name in plugins.available("mmsdk.tokencomp.methods")]
BENCHES = plugins.available("mmsdk.apps.bench")
# What is typed, the last word being the one that is completed, and what is offered.
TYPED = [
    (["as"], ["ask"]),
    (["ask", "--mo"], ["--model"]),
    (["ask", "photo.jpg", "--qu"], ["--quantize"]),
    (["ask", "--quantize", ""], ["none", "int8", "int4"]),
    (["ask", "--compress", "simple"], ["simplecluster:"]),
    (["ask", "photo.jpg", "what?", "--seed", "3", "--compress", ""], METHODS),
    (["ask", "--seed", ""], []),
    (["ask", "--kv", "in"], ["int8", "int4", "int2"]),
    (["ask", "--kv", "snap"], ["snapkv:"]),
    (["ask", "--model", ""], ["mini"]),
    (["imagine", "--model", ""], []),
    (["serve", "--dtype", "int"], []),
    (["serve", "--dtype", "b"], ["bfloat16"]),
    (["bench", ""], BENCHES),
    (["bench", "startup", "--com"], ["--committed", "--compile-only"]),
    (["weights", ""], ["pull", "list", "verify"]),
    (["weights", "--json", "pull", "m"], ["mini"]),
    (["weights", "pull", ""], list(dict.fromkeys(part.bundle for part in available()))),
    (["ros", "--params", "robot.yaml", "s"], ["simulate"]),
    (["completion", "z"], ["zsh"]),
    (["doctor", ""], ["--json"]),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "offered"), TYPED, ids=[" ".join(words) for words, _ in TYPED])
def test_bash_offers_what_the_command_line_knows(typed: list[str], offered: list[str]) -> None:
    words = ["mmsdk", *typed]
    code = f"{bash()}\nCOMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(typed)}; _mmsdk; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (offered, "")


def test_bash_offers_every_command_and_every_flag() -> None:
    code = [bash(), "COMP_WORDS=(mmsdk ''); COMP_CWORD=1; _mmsdk; echo ${COMPREPLY[*]}"]
    code += [f"COMP_WORDS=(mmsdk {name} --); COMP_CWORD=2; _mmsdk; echo ${{COMPREPLY[*]}}" for name in COMMANDS]
    first, *others = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(code)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert first.split() == [*COMMANDS, "--help", "--version"]
    assert [line.split() for line in others] == [[flag.name for flag in command.flags] for command in COMMANDS.values()]


def test_bash_leaves_paths_to_the_shell(tmp_path: Path) -> None:
    """As a person meets it: an interactive shell, a picture in the folder, the tab key."""
    (tmp_path / "scene.png").touch()
    (tmp_path / "rc").write_text(f"{bash()}\nPS1='> '\nbind 'set bell-style none'\nmmsdk() {{ printf '<%s>' \"$@\"; }}\n")
    keys = "mmsdk ask sc\t'what?'; mmsdk be\ten\t; exit\n"
    typed = subprocess.run(
        ["bash", "--rcfile", "rc", "-i"], cwd=tmp_path, input=keys, capture_output=True, text=True, check=False, timeout=20
    )
    assert "<ask><scene.png><what?>" in typed.stdout and "<bench><engine>" in typed.stdout


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs the shell fish")
@pytest.mark.parametrize(("typed", "offered"), TYPED, ids=[" ".join(words) for words, _ in TYPED])
def test_fish_offers_what_the_command_line_knows(typed: list[str], offered: list[str]) -> None:
    line = " ".join(["mmsdk", *typed])
    asked = ["fish", "--no-config", "-c", f"{fish()}\ncomplete -C {shlex.quote(line)}"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    found = {word.split("\t")[0] for word in done.stdout.splitlines()}
    # flags are offered once a dash is typed
    wanted = {word for word in offered if typed[-1] or not word.startswith("-")}
    assert (found, done.stderr) == (wanted, "")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs the shell zsh")
@pytest.mark.parametrize(("typed", "offered"), TYPED, ids=[" ".join(words) for words, _ in TYPED])
def test_zsh_offers_what_the_command_line_knows(typed: list[str], offered: list[str]) -> None:
    """zsh narrows what is offered by what is typed itself, so that is done here."""
    stubs = "compdef() { :; }; _files() { :; }; compadd() { print -l -- ${^${@[4,-1]}}:; }; _describe() { print -l -- ${offered%%:*}; }"
    code = f"{stubs}\n{zsh()}\nwords=(mmsdk {shlex.join(typed)}); CURRENT={len(typed) + 1}; _mmsdk"
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, check=False)
    assert ([word for word in done.stdout.split() if word.startswith(typed[-1])], done.stderr) == (offered, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(re.search(rf"\b{name}\b", script) for name in [*COMMANDS, *BENCHES])
    assert main(["completion", shell, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"shell": shell, "script": script}


def test_printing_one_needs_no_torch() -> None:
    code = 'import sys; from mmsdk.apps.cli import main; sys.exit(main(["completion", "bash"]) or "torch" in sys.modules)'
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
