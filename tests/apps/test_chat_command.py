"""`mmsdk chat` on the real encoder and language model, joined by an untrained projector: from a pipe, and as if somebody typed."""

import io
import json
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from mmsdk.apps.cli import main
from mmsdk.models.mini.projector import Projector, ProjectorConfig


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, mini_encoder: Path, mini_language: Path) -> list[str]:
    """The command for a model as training writes it, with short answers."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    projector = Projector(ProjectorConfig(vision=768))
    tensors = {f"projector.{name}": tensor.half() for name, tensor in projector.state_dict().items()}
    tensors |= {"lora.0.qkv.a": torch.zeros(4, 576), "lora.0.qkv.b": torch.zeros(960, 4)}
    safetensors.torch.save_file(tensors, folder / "mini_adapter.safetensors", metadata={"middle": "5"})
    return ["chat", "--model", str(folder), "--max-tokens", "3"]


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


def test_lines_of_a_pipe_are_answered_one_object_each(
    words: list[str], photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    coffee, rocket = str(photos / "coffee.png"), str(photos / "rocket.jpg")
    lines = ["What is on the table?", "", "/unod", "And beside it?", "/undo", f"/image {rocket}", "/image nowhere.png", "//What is this?"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*lines, "/system Be brief.", "/quit", "Never read."])))
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
    assert shown.err.count("\n") == 2 and "Never" not in shown.out


def test_ctrl_c_stops_an_answer_and_at_the_prompt_the_command(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Typed("Say on.\nWhat?\n/undo\n/undo\n^C\n"))
    out = Impatient()
    monkeypatch.setattr(sys, "stdout", out)
    assert main(words) == 130
    told = capsys.readouterr().err
    assert "stopped; the question is forgotten" in told and "forgotten: What?" in told and told.endswith("interrupted\n")
    assert "nothing was asked yet" in told and out.getvalue().count(">") == 5


def test_what_is_wrong_with_the_command_is_told_before_the_model_is_loaded(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for wrong, item in (
        (["nowhere.png"], "nowhere.png"),
        (["--top-p", "2"], "top_p"),
        (["--repetition-penalty", "0"], "repetition_penalty"),
    ):
        assert main(["chat", *wrong, "--model", "there/is-none"]) == 2
        assert item in capsys.readouterr().err
