"""`mmsdk serve` as a command: mini as it ships in a process of its own, ended by a signal; flags that cannot be."""

import base64
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from mmsdk.apps.cli import main
from mmsdk.weights.bundle import Bundle

SCENE = Path(__file__).parents[2] / "apps" / "media" / "scene.png"


def test_sigterm_lets_an_answer_of_mini_go_out_and_ends_with_0(mini_bundle: Bundle) -> None:
    picture = f"data:image/png;base64,{base64.b64encode(SCENE.read_bytes()).decode()}"
    content: list[Any] = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "Describe the picture."}]
    command = [sys.executable, "-m", "mmsdk.apps.entry", "serve", "--port", "0", "--compress", "uniform:0.5", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            assert told["model"] == "mini" and told["url"].startswith("http://127.0.0.1:")
            with openai.OpenAI(base_url=told["url"], api_key="none", max_retries=0, timeout=120) as client:
                messages: list[Any] = [{"role": "user", "content": content}]
                options: Any = {"include_usage": True}
                stream = client.chat.completions.create(model="mini", messages=messages, max_tokens=40, stream=True, stream_options=options)
                chunks = [next(iter(stream))]
                process.send_signal(signal.SIGTERM)
                chunks += list(stream)
            process.wait(60)
        finally:
            process.kill()
    assert process.returncode == 0
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text.strip() and chunks[-2].choices[0].finish_reason in ("stop", "length")
    usage = chunks[-1].usage
    assert usage is not None and usage.model_extra is not None
    assert 0 < usage.model_extra["visual_tokens_kept"] < usage.model_extra["visual_tokens"]


@pytest.mark.parametrize(("grace", "code"), [("0.5", 0), ("600", 130)])
def test_ctrl_c_tells_whom_it_waits_for_and_whoever_is_cut_off_is_told(mini_bundle: Bundle, grace: str, code: int) -> None:
    """No traceback, at the end of the grace and by a second Ctrl-C."""
    command = [sys.executable, "-m", "mmsdk.apps.entry", "serve", "--port", "0", "--grace", grace, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            url = json.loads(process.stdout.readline())["url"]
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
                said: list[Any] = [{"role": "user", "content": "Say on and on."}]
                form = {"guided_regex": "[a-z ]{4000}"}
                stream = client.chat.completions.create(model="mini", messages=said, max_tokens=1000, stream=True, extra_body=form)
                pieces = iter(stream)
                next(pieces)
                process.send_signal(signal.SIGINT)
                assert process.stderr.readline() == f"mmsdk: 1 open answer may take up to {grace} s; Ctrl-C again ends at once\n"
                if code:
                    process.send_signal(signal.SIGINT)
                with pytest.raises(openai.APIError, match="the server ended: the request was not answered to its end"):
                    list(pieces)
            rest = process.stderr.read()
            process.wait(60)
        finally:
            process.kill()
    assert process.returncode == code and rest == ("\ninterrupted\n" if code else "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rows", "0"], "rows: it is 0, expected a whole number of at least 1"),
        (["--timeout", "nan"], "seconds"),
        (["--body-timeout", "0"], "arrival"),
        (["--kv", "nope"], "'nope' is not known; choose dense"),
        (["--kv", "snapkv:2.5"], "2.5"),
        (["--port", "70000"], "70000 is no port"),
        (["--host", "203.0.113.1"], "cannot listen there"),
        (["--allow-network", "here"], "networks are written like"),
        (["--api-key-file", "missing.txt"], "missing.txt: cannot be read"),
        (["--api-key-file", "empty.txt"], "empty.txt: it is empty"),
        (["--hots", "x"], "did you mean '--host'?"),
    ],
)
def test_flags_that_cannot_be_are_told_before_a_model_is_loaded(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n", encoding="utf-8")
    assert main(["serve", "--port", "0", "--model", "no such model", *words, "--json"]) == 2
    assert told in json.loads(capsys.readouterr().out)["error"]["message"]
