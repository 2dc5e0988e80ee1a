"""The training program: on any device, ended by Ctrl-C without a half-trained adapter, gone on with by the same command."""

import json
import os
import signal
import threading
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mmsdk.apps.train_mini import __main__ as program
from mmsdk.apps.train_mini import finetune as tuning
from mmsdk.apps.train_mini import loop
from mmsdk.apps.train_mini.features import Sample, Shard
from mmsdk.apps.train_mini.ground import WordTable, gather, probe
from mmsdk.apps.train_mini.packing import Batch
from mmsdk.apps.train_mini.scenes import Scene, Thing
from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.models.mini.family import load_parts
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.models.mini.words import ADAPTER
from mmsdk.weights.bundle import Bundle

WIDTH, VISION = 24, 10
CONFIG = DecoderConfig(
    vocabulary=300, width=WIDTH, layers=2, heads=4, kv_heads=2, head_dim=6, inner=40, context=256, rope_theta=1e4, tied=True
)
SHORT = ["--no-compile", "--few-steps", "0", "--ground-steps", "4", "--steps", "3", "--full-steps", "1", "--rows", "2", "--evaluate", "2"]


class Letters:
    """One token a character."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(c) % 290 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i - 3) for i in ids)


def shard() -> Shard:
    things = (Thing("dog", "", "object", 0.2, 0.2, 0.2, 0.2), Thing("circle", "red", "shape", 0.8, 0.8, 0.2, 0.2))
    sample = Sample(Scene(np.zeros((0, 0, 3), np.uint8), things), None)
    features = torch.randn(4, 16, VISION, generator=torch.Generator().manual_seed(1)).half()
    return Shard((sample,) * 4, features, torch.full((4,), 16), torch.tensor([[1, 4, 4]] * 4))


def decoder(device: str = "cpu") -> Decoder:
    torch.manual_seed(0)
    made = Decoder(CONFIG)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return Decoder.of(CONFIG, {name: tensor.to(device) for name, tensor in made.state_dict().items()}).requires_grad_(False)


def trained(folder: Path, device: str = "cpu") -> int:
    """The exit code of all that comes after the shards."""
    folder.mkdir(exist_ok=True)
    args = program._arguments(["--folder", str(folder), *SHORT])
    return program._train(args, decoder(device), Letters(), [shard()], [shard()])


def press_ctrl_c_when_training_listens() -> threading.Thread:
    """A real signal, as soon as the loop has its own handler: while the first step is made."""
    before = signal.getsignal(signal.SIGINT)

    def press() -> None:
        deadline = time.monotonic() + 30
        while signal.getsignal(signal.SIGINT) is before and time.monotonic() < deadline:
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def test_ctrl_c_saves_says_how_to_go_on_and_exports_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    hand = press_ctrl_c_when_training_listens()
    assert trained(tmp_path / "broken") == 130
    hand.join()
    assert signal.getsignal(signal.SIGINT) is before
    out, err = capsys.readouterr()
    assert "family" not in out and "the same command goes on from there" in err and str(tmp_path / "broken") in err
    assert not (tmp_path / "broken" / ADAPTER).exists()
    assert int(load_file(tmp_path / "broken" / "checkpoint.safetensors")["optimiser.0.step"]) in (1, 2)

    assert trained(tmp_path / "broken") == 0 == trained(tmp_path / "whole")
    assert '"mode": "shuffled"' in capsys.readouterr().out
    found, expected = (load_file(tmp_path / name / ADAPTER) for name in ("broken", "whole"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-3, rtol=1e-2)


def test_whether_it_came_to_the_end_is_told(tmp_path: Path) -> None:
    recipe = tuning.Recipe(steps=2, scene_steps=1, full_steps=0, rows=1, length=200, rank=2, warmup=1)
    told = []
    for stop in (1, 1, None):
        made = decoder()
        parts = Projector(ProjectorConfig(VISION, 16, WIDTH)), tuning.Adapters(made, 2, 2.0, 0)
        told.append(loop.finetune(made, *parts, [shard()], Letters(), recipe, tmp_path, stop_after=stop))
    assert told == [False, True, True]


def test_ctrl_c_before_that_ends_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "_run", interrupted)
    assert program.main(["--folder", str(tmp_path)]) == 130
    assert capsys.readouterr().err.strip().startswith("interrupted")


def test_a_grounded_projector_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    # what is in the way of the file beside it keeps the file from being written at all
    (tmp_path / "grounded.part").mkdir()
    with pytest.raises((OSError, SafetensorError)):
        trained(tmp_path)
    assert not (tmp_path / "grounded.safetensors").exists()


def test_the_processor_is_taken_where_there_is_no_gpu_and_a_gpu_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = torch.cuda.is_available()
    assert program._device("cpu").type == "cpu" and program._device("auto").type == ("cuda" if here else "cpu")
    if not here:
        assert program.main(["--folder", str(tmp_path), "--device", "cuda"]) == 2
        assert capsys.readouterr().err.startswith("train_mini: --device cuda: torch sees no GPU here")


def batch() -> Batch:
    recipe = tuning.Recipe(rows=2, length=200)
    return loop.batch_of(loop.Mixture([shard()]), recipe, 0, Letters(), {})


def test_a_batch_is_packed_on_the_processor_and_goes_whole_to_a_device() -> None:
    here = batch()
    there = here.to(torch.device("meta"))
    for field in fields(Batch):
        mine, moved = getattr(here, field.name), getattr(there, field.name)
        if isinstance(mine, Tensor):
            assert (mine.device.type, moved.device.type, moved.shape, moved.dtype) == ("cpu", "meta", mine.shape, mine.dtype)
    assert there.kinds == here.kinds
    assert here.to(torch.device("cpu")).ids is here.ids


def test_updates_are_made_where_the_decoder_is() -> None:
    made = tuning.Adapters(decoder("meta"), 2, 2.0, 0)
    assert {parameter.device.type for parameter in made.parameters()} == {"meta"}


def test_what_a_step_makes_it_makes_beside_what_it_is_given() -> None:
    """A tensor that is made without a word of its place lands on `meta` here, which no tensor of the processor can be joined with."""
    made, rows = decoder(), batch()
    eyes, adapters = Projector(ProjectorConfig(VISION, 16, WIDTH)), tuning.Adapters(made, 2, 2.0, 0)
    table = WordTable.of(made.embedding.weight, Letters())
    patches = gather(shard(), table)

    def step() -> tuple[Tensor, dict[str, float]]:
        eyes.zero_grad()
        loss, _ = tuning.loss_of(made, tuning.forward(made, eyes, adapters.cast(torch.float32), rows), rows)
        loss.backward()
        return loss, probe(eyes, patches, table)

    expected = step()
    with torch.device("meta"):
        found = step()
    assert found[0].device.type == "cpu" and torch.equal(found[0], expected[0]) and found[1] == expected[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_learns_what_the_processor_does_and_either_goes_on_from_the_other(tmp_path: Path) -> None:
    losses = []
    for devices in (("cpu", "cpu"), ("cuda", "cpu"), ("cpu", "cuda")):
        folder = tmp_path / "-".join(devices)
        folder.mkdir()
        recipe = tuning.Recipe(steps=2, scene_steps=1, full_steps=0, rows=1, length=200, rank=2, warmup=1)
        for device in devices:
            torch.manual_seed(2)
            made = decoder(device)
            parts = Projector(ProjectorConfig(VISION, 16, WIDTH)).to(device), tuning.Adapters(made, 2, 2.0, 0)
            loop.finetune(made, *parts, [shard()], Letters(), replace(recipe), folder, stop_after=1)
        losses.append([json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()])
    assert losses[1] == pytest.approx(losses[0], abs=1e-2) and losses[2] == pytest.approx(losses[0], abs=1e-2)


def test_the_whole_program_makes_an_adapter_that_mini_loads(
    mini_bundle: Bundle, emoji: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ["--drawn", "3", "0", "0", "--shards", "1", "--backdrops", "0", "--renders", "0"]
    short = [
        "--no-compile",
        "--ground-steps",
        "4",
        "--steps",
        "1",
        "--full-steps",
        "0",
        "--few-steps",
        "1",
        "--rows",
        "1",
        "--evaluate",
        "1",
    ]
    assert program.main(["--folder", str(tmp_path), *tiny, *short]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [(row["family"], row["mode"]) for row in told] == [("scene", mode) for mode in ("seeing", "blind", "shuffled")]
    assert {path.name for path in tmp_path.iterdir()} == {
        *(f"{name}.{kind}" for name in ("train0", "held") for kind in ("json", "safetensors")),
        *("grounded.safetensors", "checkpoint.safetensors", "log.jsonl", "few.safetensors", ADAPTER),
    }
    made = load_parts(replace(mini_bundle, adapter=tmp_path / ADAPTER), torch.bfloat16, torch.device("cpu"))
    assert made.encoder.width == 2 * 384
