"""A folder of its own for the pages of one memory, inside one that many may share, also from several processes.

It goes when its owner leaves. What a process that crashed left behind goes when the next one moves in: whoever lives holds the lock of
its room, and the system lets go of it with the process.
"""

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["Room", "moved_in"]

_ROOM, _LOCK, _DOOR = "world-", "in-use.lock", ".worlds.lock"
_OURS = ("*.page", "*.part", _LOCK)


@dataclass(frozen=True, slots=True)
class Room:
    """A folder that nobody else reads or writes, for as long as its lock is held."""

    folder: Path
    lock: FileLock
    process: int

    def leave(self) -> None:
        """Remove the folder. A fork of the process that moved in leaves it alone."""
        if os.getpid() == self.process:
            self.lock.release()
            _cleared(self.folder)


def moved_in(house: Path) -> Room:
    """A new room in a folder, which is made if need be; leftovers in it are removed. Raises OSError as the disk does."""
    house.mkdir(parents=True, exist_ok=True)
    # one at a time, so that nobody takes a room that is just being made for a leftover
    with FileLock(house / _DOOR):
        for old in _rooms(house):
            if _free(old):
                _cleared(old)
        folder = Path(tempfile.mkdtemp(prefix=_ROOM, dir=house))
        lock = FileLock(folder / _LOCK, thread_local=False)
        lock.acquire()
    return Room(folder, lock, os.getpid())


def _rooms(house: Path) -> list[Path]:
    return [path for path in house.glob(f"{_ROOM}*") if path.is_dir() and not path.is_symlink()]


def _free(folder: Path) -> bool:
    """Whether nobody lives in a room."""
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        # somebody does, or it is another user's
        return False
    lock.release()
    return True


def _cleared(folder: Path) -> None:
    """Remove what a memory writes, and the folder where there is nothing else. What cannot be removed stays for the next one."""
    with suppress(OSError):
        for kind in _OURS:
            for path in folder.glob(kind):
                path.unlink(missing_ok=True)
        folder.rmdir()
