"""The cache between processes: what changes under a reader's hands is not recorded, and what is replaced is never gone."""

import shutil
from pathlib import Path

import pytest

from mmsdk.weights import cache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An artefact of two files, checked and recorded."""
    path = tmp_path / "artefact-1.0"
    (path / "sub").mkdir(parents=True)
    (path / "a").write_bytes(b"one")
    (path / "sub" / "b").write_bytes(b"two")
    cache.record(path, "expected")
    assert cache.is_recorded(path, "expected") and not cache.is_recorded(path, "other")
    return path


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"half"])
def test_a_record_that_is_being_written_is_no_record(folder: Path, content: bytes) -> None:
    folder.with_name("artefact-1.0.checked").write_bytes(content)
    assert not cache.is_recorded(folder, "expected")


def test_a_record_that_cannot_be_read_is_no_record(folder: Path) -> None:
    note = folder.with_name("artefact-1.0.checked")
    note.unlink()
    note.mkdir()
    assert not cache.is_recorded(folder, "expected")


def test_a_folder_that_goes_while_it_is_looked_at_is_not_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = cache.listing

    def listed_and_gone(place: Path) -> list[Path]:
        found = listing(place)
        shutil.rmtree(place)
        return found

    monkeypatch.setattr(cache, "listing", listed_and_gone)
    assert not cache.is_recorded(folder, "expected")


def test_the_new_takes_the_place_of_the_old_and_leaves_nothing_beside_it(folder: Path, tmp_path: Path) -> None:
    with cache.staging(folder) as staging:
        ready = staging / "ready"
        ready.mkdir()
        (ready / "new").write_bytes(b"three")
        held = (folder / "a").open("rb")
        cache.place(ready, folder)
    with held:
        assert held.read() == b"one"  # whoever has the old one open keeps it
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artefact-1.0", "artefact-1.0.checked"]


def test_a_first_artefact_needs_nothing_to_replace(tmp_path: Path) -> None:
    (tmp_path / "staging" / "ready").mkdir(parents=True)
    cache.place(tmp_path / "staging" / "ready", tmp_path / "artefact-1.0")
    assert (tmp_path / "artefact-1.0").is_dir() and not list((tmp_path / "staging").iterdir())


def test_the_old_is_back_where_the_new_cannot_be_moved(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "staging").mkdir()
    with pytest.raises(FileNotFoundError):
        cache.place(tmp_path / "staging" / "missing", folder)
    assert (folder / "a").read_bytes() == b"one" and cache.is_recorded(folder, "expected")
