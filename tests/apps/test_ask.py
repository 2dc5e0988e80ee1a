"""`mmsdk ask` on the real encoder and language model, joined by an untrained projector: what it says is noise, how it says it is not."""

import base64
import io
import json
import os
import re
import sys
from pathlib import Path

import PIL.Image
import pytest
import safetensors.torch
import torch

from mmsdk.answer import Answer
from mmsdk.apps import demo
from mmsdk.apps.answers import as_json
from mmsdk.apps.cli import main
from mmsdk.generate.config import GenerationConfig
from mmsdk.models.mini.family import Mini
from mmsdk.models.mini.projector import Projector, ProjectorConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, mini_encoder: Path, mini_language: Path) -> Path:
    """A folder as training writes it."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    projector = Projector(ProjectorConfig(vision=768))
    tensors = {f"projector.{name}": tensor.half() for name, tensor in projector.state_dict().items()}
    tensors |= {"lora.0.qkv.a": torch.zeros(4, 576), "lora.0.qkv.b": torch.zeros(960, 4)}
    safetensors.torch.save_file(tensors, folder / "mini_adapter.safetensors", metadata={"middle": "5"})
    return folder


def test_one_json_object_and_a_picture(model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "looked.png"
    words = ["ask", str(photos / "coffee.png"), str(photos / "rocket.jpg"), "What is on the table?", "--model", str(model), "--json"]
    assert main([*words, "--max-tokens", "4", "--seed", "7", "--compress", "uniform:64", "--explain", str(drawn)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"text", "model", "tokens", "timings_ms", "seed", "finish", "fidelity"}
    assert [set(one) for one in told["fidelity"]] == [{"nqe", "coverage", "cosine"}] * 2
    assert told["model"] == str(model) and told["seed"] == 7
    tokens = told["tokens"]
    assert set(tokens) == {"visual", "kept", "prompt", "generated"}
    assert 400 < tokens["visual"] <= 512 and tokens["kept"] == 128 < tokens["prompt"] < 160 and 1 <= tokens["generated"] <= 4
    assert set(told["timings_ms"]) == {"load", "encode", "compress", "prefill", "decode"} and min(told["timings_ms"].values()) > 0
    with PIL.Image.open(drawn) as picture:
        assert picture.width > 600 and picture.height > 400


def test_options_may_stand_between_and_sources_be_of_any_kind(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mon café 猫 🧿.png"
    moving = tmp_path / "moving.gif"
    with PIL.Image.open(photos / "coffee.png") as photo:
        photo.resize((56, 56)).save(path)
        photo.resize((56, 56)).save(moving, save_all=True, append_images=[PIL.Image.new("RGB", (56, 56))])
    uri = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    words = ["ask", str(path), "--model", str(model), uri, str(moving), "--max-tokens", "2", "Are these the same? 猫", "--json"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["tokens"]["visual"] == 768 and shown.out.isascii()
    assert f"{moving}: the first of several frames; in `mmsdk chat`, /video reads them all" in shown.err and shown.err.count("\n") == 1


class Reader(io.StringIO):
    """A reader of the answer who presses Ctrl-C when it begins."""

    def write(self, text: str, /) -> int:
        if text.strip():
            raise KeyboardInterrupt
        return super().write(text)


def test_an_answer_may_be_interrupted_or_nobody_read_it(
    model: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["ask", str(photos / "coffee.png"), "What is on the table?", "--model", str(model), "--max-tokens", "8"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Reader())
        assert main(words) == 130
    assert "interrupted" in capsys.readouterr().err
    read, write = os.pipe()
    os.close(read)
    with monkeypatch.context() as patch, os.fdopen(write, "w") as nobody:
        patch.setattr(sys, "stdout", nobody)
        assert main(words) == 141
    assert capsys.readouterr().err == ""


def test_a_seed_says_the_same_streamed_and_whole(model: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ask", str(photos / "coffee.png"), "What is it?", "--model", str(model), "--dtype", "float32", "--device", "cpu"]
    words += ["--temperature", "1.5", "--seed", "5", "--max-tokens", "6"]
    assert main(words) == 0
    streamed = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert streamed == json.loads(capsys.readouterr().out)["text"] + "\n"


def test_several_answers_and_how_likely_they_were(model: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ask", str(photos / "coffee.png"), "What is it?", "--model", str(model), "--dtype", "float32", "--max-tokens", "4"]
    words += ["--temperature", "1.5", "--repetition-penalty", "1.3", "--top-k", "50"]
    assert main([*words, "--n", "0"]) == 2 and "--n" in capsys.readouterr().err
    assert main([*words, "--n", "2", "--seed", "5", "--logprobs", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["answers"]
    assert [one["seed"] for one in told] == [5, 6] and told[0]["text"] != told[1]["text"]
    assert all(len(one["logprobs"]) == 4 and len(one["logprobs"][0]["top"]) == 3 for one in told)


def test_beams_are_told_with_their_scores_and_said_in_one_piece(model: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ask", str(photos / "coffee.png"), "What is it?", "--model", str(model), "--dtype", "float32", "--max-tokens", "4"]
    words += ["--num-beams", "3", "--length-penalty", "0.5"]
    assert main([*words, "--n", "2", "--early-stopping", "never", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["answers"]
    assert 0 > first["score"] > second["score"]
    assert main(words) == 0 and capsys.readouterr().out.count("\n") >= 1
    for wrong, item in (["--num-beams", "0"], "num_beams"), (["--temperature", "1"], "num_beams"), (["--n", "4"], "n: it is 4"):
        assert main([*words, *wrong]) == 2 and item in capsys.readouterr().err


def test_a_score_of_nothing_is_a_score(small: Mini) -> None:
    for beams, told in ((1, False), (2, True)):
        found = as_json(Answer("yes"), "mini", small.tokenizer, GenerationConfig(num_beams=beams))
        assert ("score" in found) == told and found.get("score", 0.0) == 0.0


def test_text_is_streamed_and_errors_of_a_clip_are_one_line(model: Path, clips: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip = str(clips / "carphone_pristine.mp4")
    assert main(["ask", clip, "Who is it?", "--model", str(model), "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.endswith("\n")
    assert main(["ask", clip, "Who is it?", "--model", str(model), "--max-tokens", "100000"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "max_tokens" in shown.err


def test_the_demo_answers_and_draws_every_question(
    model: Path,
    photos: Path,
    clips: Path,
    simulated: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "LONGEST", 2)
    assert main(["demo", "--write", "--model", str(model), "--out", str(tmp_path / "demo")]) == 0
    shown = capsys.readouterr().out
    assert len(demo.ASKED) == 4 and all(asked.file in shown and asked.question in shown for asked in demo.ASKED)
    for stage in ("load", "encode", "compress", "prefill", "decode"):
        assert stage in shown
    drawn = {path.name for path in (tmp_path / "demo").iterdir()}
    assert drawn == {*(f"{Path(asked.file).stem}.png" for asked in demo.ASKED), "overview.png", "robot.gif"}
    assert re.search(r'told "open the drawer": done after \d+ steps', shown)
    with PIL.Image.open(tmp_path / "demo" / "robot.gif") as film:
        assert film.width == 2 * film.height and film.n_frames > 20
