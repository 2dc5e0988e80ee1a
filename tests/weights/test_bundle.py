"""Named bundles: what they hold, where they live, and that the published packages are the ones that were meant."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from mmsdk.cache import cache_folder
from mmsdk.errors import WeightsError
from mmsdk.weights import available, bundle, cache, pull, verify


def test_mini_is_the_published_files(mini_encoder: Path, mini_language: Path) -> None:
    # The hashes are taken here from the files by another route than the one under test, and compared with published values.
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (mini_encoder, mini_language)}
    assert found == {
        "vit_s_focus.onnx": "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
        "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    }
    assert [(state.part, state.state, state.path) for state in verify("mini")] == [
        ("encoder", "verified", mini_encoder),
        ("language", "verified", mini_language),
    ]


def test_photos_are_pictures(photos: Path) -> None:
    files = sorted(photos.iterdir())
    assert len(files) == 26
    with Image.open(photos / "astronaut.png") as astronaut:
        assert astronaut.size == (512, 512)


def test_emoji_are_pictures_with_names() -> None:
    if shutil.which("npm") is None:
        pytest.skip("emoji come through npm")
    folder = pull("emoji")["images"]
    assert (folder / "emoji.json").read_bytes()[:1] == b"["
    with Image.open(folder / "img" / "google" / "64" / "1f34e.png") as apple:
        assert apple.size == (64, 64)
    assert not (folder / "img" / "google" / "sheets").exists()


def test_without_npm_the_message_says_what_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSDK_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WeightsError, match=r"install Node\.js"):
        pull("emoji")


def test_an_unknown_bundle_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="'mini', 'emoji', 'photos'"):
        pull("maxi")
    with pytest.raises(WeightsError, match="'maxi'"):
        verify("maxi")
    with pytest.raises(WeightsError, match="not a bundled model"):
        bundle("photos")


def test_available_says_what_is_missing_without_fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSDK_CACHE", str(tmp_path / "empty"))
    states = available()
    assert {(state.bundle, state.part, state.state) for state in states} == {
        ("mini", "encoder", "absent"),
        ("mini", "language", "absent"),
        ("emoji", "images", "absent"),
        ("photos", "images", "absent"),
        ("backdrops", "places", "absent"),
        ("backdrops", "animals", "absent"),
        ("backdrops", "surfaces", "absent"),
        ("clips", "clips", "absent"),
        ("books", "moby-dick", "absent"),
    }
    assert not (tmp_path / "empty").exists()
    assert [state.state for state in verify("mini")] == ["absent", "absent"]


@pytest.mark.parametrize(
    ("platform", "settings", "expected"),
    [
        ("linux", {}, "home/.cache/mmsdk"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/mmsdk"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "home/.cache/mmsdk"),
        ("linux", {"XDG_CACHE_HOME": "/xdg", "MMSDK_CACHE": "/chosen"}, "/chosen"),
        ("linux", {"MMSDK_CACHE": "~/chosen"}, "home/chosen"),
        ("darwin", {"XDG_CACHE_HOME": "/xdg"}, "home/Library/Caches/mmsdk"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/mmsdk/Cache"),
    ],
)
def test_the_cache_is_where_the_platform_keeps_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, settings: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CACHE_HOME", "MMSDK_CACHE", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == tmp_path / expected


def test_the_digest_of_many_files_is_what_sha256sum_says(tmp_path: Path) -> None:
    for name in ("b/two", "a", "b-", "b/one"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    command = "find * -type f | LC_ALL=C sort | xargs sha256sum | sha256sum"
    said = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()[0]
    assert cache.digest(tmp_path) == said
