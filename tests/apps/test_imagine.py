"""`mmsdk imagine`: films of sentences, there as a whole or not at all; and films themselves, read back by the SDK's own intake."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmsdk.apps.cli import main
from mmsdk.diffusion.dit import DiT, DiTConfig
from mmsdk.diffusion.imagine import Imaginer, Screen, save_imaginer
from mmsdk.diffusion.rotary import Spread, Waves
from mmsdk.diffusion.words import Words
from mmsdk.errors import InputError
from mmsdk.vision import films
from mmsdk.vision.films import check_film, save_film
from mmsdk.vision.intake import load, load_video
from mmsdk.vision.types import Video


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was taught nothing."""
    torch.manual_seed(0)
    spread, at = Spread(4), tmp_path_factory.mktemp("model")
    config = DiTConfig(
        3, 3, 1, 12, 16, 1, 8, spread, (1, 4, 4), frequencies=8, order="channels_first", standing=Waves(spread), predicts="clip"
    )
    save_imaginer(at, Imaginer(DiT(config), Words(("a", "ball"), 8, 4), Screen(4, 16, 16, 8.0, 3.0)))
    return at


@pytest.mark.parametrize("name", ["ball.mp4", "ball.gif", "ball.png"])
def test_a_sentence_becomes_a_file(name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / name
    words = ["imagine", "a ball", "--model", str(folder), "--out", str(out), "--steps", "3", "--coarse", "1", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["out"] == str(out) and told["passes"] > 0 and [path.name for path in tmp_path.iterdir()] == [name]
    assert load(out).size[1] == 4 * 18 if name == "ball.png" else load_video(out).size == (256, 256)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a ball"], "train one with"),
        (["a ball", "--model", "NOWHERE"], "no video model 'NOWHERE'"),
        (["a ball", "--model", "MODEL", "--out", "ball.webm"], ".mp4, .gif, .png"),
        (["a ball", "--model", "MODEL", "--out", "no/such/ball.gif"], "cannot be written there"),
        (["a blue ball", "--model", "MODEL"], "'blue' is none of them"),
        (["a ball", "--model", "MODEL", "--steps", "0"], "at least 1"),
        (["a ball", "--model", "MODEL", "--attention", "svg3"], "svg2"),
    ],
)
def test_what_cannot_be_is_told_with_the_way_out(
    words: list[str], told: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["imagine", *[str(folder) if word == "MODEL" else word for word in words]]) == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error and not list(tmp_path.iterdir())


def clip() -> Video:
    frames = torch.stack([torch.full((3, 16, 16), 60 * number, dtype=torch.uint8) for number in range(4)])
    return Video(frames, torch.arange(4) / 8, source="grey")


def test_a_film_is_its_frames(tmp_path: Path) -> None:
    """Lossless where the format is, near where it is not, as long as it was."""
    save_film(clip(), tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as image:
        assert image.n_frames == 4 and image.info["duration"] in (120, 125, 130)
        assert np.asarray(image.convert("RGB")).max() == 0
        image.seek(3)
        assert abs(int(np.asarray(image.convert("RGB")).mean()) - 180) <= 1
    save_film(clip(), tmp_path / "a.mp4")
    back = load_video(tmp_path / "a.mp4")
    shown = sorted({round(float(frame.float().mean()) / 60) for frame in back.frames})
    assert shown == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
def test_ctrl_c_leaves_what_was_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    path.write_bytes(b"before")

    def interrupted(part: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(films.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_film(clip(), path)
    assert path.read_bytes() == b"before" and [found.name for found in tmp_path.iterdir()] == [name]


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=".mp4, .gif, .png"):
        check_film(tmp_path / "a.avi")
