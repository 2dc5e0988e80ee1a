"""Where fetched weights live in the cache folder, and how a file gets in there whole or not at all.

Layout: `<cache>/weights/<artefact>/` holds the files of one artefact, `<artefact>.checked` the record of its last full check,
`<artefact>.lock` the lock between processes, `.staging-<artefact>` what is being fetched just now.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from mmsdk.cache import SETTING
from mmsdk.errors import WeightsError

__all__ = ["digest", "forget", "is_recorded", "listing", "locked", "place", "record", "staging"]


def listing(folder: Path) -> list[Path]:
    """The files under a folder, in the order of their POSIX paths (the order that `digest` hashes them in)."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def digest(folder: Path) -> str:
    """sha256 of what a folder holds: of the file itself where there is one, else of the text that `sha256sum` prints for all.

    `find * -type f | LC_ALL=C sort | xargs sha256sum | sha256sum`, run in the folder, gives the same value for many files.
    """
    files = listing(folder)
    sums = [(_sha256(path), path.relative_to(folder).as_posix()) for path in files]
    if len(sums) == 1:
        return sums[0][0]
    return hashlib.sha256("".join(f"{value}  {name}\n" for value, name in sums).encode()).hexdigest()


def is_recorded(folder: Path, expected: str) -> bool:
    """Whether the folder was fully checked against `expected` and no file changed in size or time since: a matter of `stat` calls.

    It asks without the lock. What another process takes away meanwhile, or cannot be read, is not recorded: whoever needs it takes the
    lock and looks again.
    """
    try:
        return folder.is_dir() and _note(folder).read_text(encoding="utf-8") == _stamp(folder, expected)
    except (OSError, UnicodeDecodeError):
        return False


def record(folder: Path, expected: str) -> None:
    """Note that the folder's content was just found to have this digest."""
    _note(folder).write_text(_stamp(folder, expected), encoding="utf-8")


def forget(folder: Path) -> None:
    """Drop the note, so that the next use hashes the content again."""
    _note(folder).unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the artefact's lock: one process fetches, the others wait and then find it there."""
    with _writable(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(_beside(folder, ".lock"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """An empty folder on the same disk as the cache, removed at the end, also after Ctrl-C; call it under `locked`."""
    room = folder.with_name(f".staging-{folder.name}")
    # What a killed process left behind is worthless: the lock says that nobody else is at work in it.
    shutil.rmtree(room, ignore_errors=True)
    with _writable(folder.parent):
        room.mkdir()
    try:
        with _writable(folder.parent):
            yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)


def place(ready: Path, folder: Path) -> None:
    """Move a complete folder to its place by renaming; what stood there before goes last, and comes back where that fails.

    The old one is set aside beside `ready`, in the staging folder, and is swept away with it even where this process is killed.
    """
    aside = ready.with_name("old")
    if folder.exists():
        os.replace(folder, aside)
    try:
        os.replace(ready, folder)
    except OSError:
        if aside.exists():
            os.replace(aside, folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _stamp(folder: Path, expected: str) -> str:
    seen = hashlib.sha256(expected.encode())
    for path in listing(folder):
        status = path.stat()
        seen.update(f"{path.relative_to(folder).as_posix()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return seen.hexdigest()


def _note(folder: Path) -> Path:
    return _beside(folder, ".checked")


def _beside(folder: Path, suffix: str) -> Path:
    # Not with_suffix: an artefact's name ends in a version, which that would cut.
    return folder.with_name(folder.name + suffix)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightsError(f"cannot write weights into {folder}: {error}; free some space or set {SETTING} to another folder") from error
