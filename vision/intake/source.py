"""What may be handed over as a picture or a clip, and how its encoded bytes are reached: one seekable stream, whatever the way in."""

import errno
import io
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import PIL.Image
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.intake.access import Access
from mmsdk.vision.intake.kinds import HEAD, Kind, kind_of
from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.intake.stranger import stranger
from mmsdk.vision.intake.uri import file_path, read_data_uri
from mmsdk.vision.intake.url import fetch
from mmsdk.vision.types import Image, Video
from mmsdk.vision.values import shown, whole

__all__ = ["Encoded", "EncodedSource", "Frame", "Readable", "Source", "Stream", "named_unreadable", "opened"]


@runtime_checkable
class Readable(Protocol):
    """A file that is open for reading bytes."""

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes, all that are left where it is negative."""
        ...


@runtime_checkable
class Stream(Readable, Protocol):
    """A file that can also be read from another place: what `typing.BinaryIO` asks beyond this, `io.BytesIO` does not have."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a place, as `io.IOBase.seek` does."""
        ...

    def tell(self) -> int:
        """Where it stands, in bytes from the beginning."""
        ...


EncodedSource = str | os.PathLike[str] | bytes | bytearray | memoryview | Readable
"""A path, a data:, file: or http(s) address, bytes, or an open binary file."""

Frame = EncodedSource | PIL.Image.Image | np.ndarray | Tensor | Image
"""Anything that is one picture."""

Source = Frame | Video | Sequence[Frame]
"""Anything that is one picture or one clip; a clip may be given as the sequence of its frames."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A file's content: where to read it (from its beginning, seekable), what to call it in messages, its format and length.

    `path` is where the same content stands as a file of its own, empty where it does not.
    """

    stream: Stream
    item: str
    kind: Kind
    size: int
    path: str = ""

    def read(self, limits: Limits) -> bytes:
        """All of it, if it may be held in memory."""
        limits.check_bytes(self.size, self.item)
        with named_unreadable(self.item):
            self.stream.seek(0)
            content = self.stream.read()
        # what a file says of its length is not always true
        limits.check_bytes(len(content), self.item)
        return content


@contextmanager
def opened(source: EncodedSource, limits: Limits, access: Access) -> Iterator[Encoded]:
    """Open a source for the time of a `with`; a file of the caller's is left open, and where it was.

    Raises InputError, naming the source, where there is no such file, it is not a regular file, it cannot be read, or its content is
    in no format that is read.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        yield _encoded(io.BytesIO(_flat(source)), "bytes")
    elif isinstance(source, str | os.PathLike):
        with _located(source, limits, access) as encoded:
            yield encoded
    else:
        with _borrowed(source, limits) as encoded:
            yield encoded


@contextmanager
def _located(source: str | os.PathLike[str], limits: Limits, access: Access) -> Iterator[Encoded]:
    # an address copied from a page may come with the space around it
    address = source.strip() if isinstance(source, str) else ""
    scheme = address[:8].partition(":")[0].lower()
    if scheme == "data":
        yield _encoded(io.BytesIO(read_data_uri(address, limits)), "data URI")
    elif scheme in {"http", "https"}:
        yield _encoded(io.BytesIO(fetch(address, access, limits)), address.partition("?")[0][:200])
    else:
        path = file_path(address, access.files) if scheme == "file" else _path(source)
        with _file(path) as stream:
            yield _encoded(_Guarded(stream, str(path)), str(path), str(path))


def _path(source: str | os.PathLike[str]) -> Path:
    # `__fspath__` may be the caller's own
    with named_unreadable(type(source).__name__):
        name = os.fsdecode(source)
    return Path(_filled(name))


def _filled(name: str) -> str:
    """The name, if it names anything: an empty one would be taken for the folder that the program runs in."""
    if not name.strip():
        raise InputError("an empty path; name the picture's or the clip's file", item=repr(name[:60]))
    return name


def _flat(data: bytes | bytearray | memoryview) -> bytes | bytearray:
    if not isinstance(data, memoryview):
        return data
    try:
        # of any stride
        return data.tobytes()
    except ValueError as error:
        raise InputError(f"cannot be read: {error}", item="bytes") from None


def _file(path: Path) -> io.BufferedReader:
    item = str(path)[:200]
    try:
        # a pipe or a device would block, or never end
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError("a folder, a device or a pipe; name a file", item=item)
        return path.open("rb")
    except FileNotFoundError:
        raise InputError("there is no such file", item=item) from None
    except ValueError as error:
        raise error if isinstance(error, InputError) else InputError(f"not a path: {error}", item=item) from None
    except OSError as error:
        hint = '; base64 is passed as "data:image/png;base64,..."' if error.errno == errno.ENAMETOOLONG else ""
        raise InputError(f"cannot be opened: {error.strerror or error}{hint}", item=item) from None


@contextmanager
def _borrowed(source: Readable, limits: Limits) -> Iterator[Encoded]:
    """A file object of the caller's: read in place where it can seek, else into memory."""
    # a class has the methods of its files, but there is nothing to read in it
    if isinstance(source, type) or not isinstance(source, Readable):
        raise stranger(source)
    item = _name(source)
    if not isinstance(source, Stream) or (place := _rewound(source, item)) is None:
        yield _encoded(io.BytesIO(_drained(source, limits, item)), item)
        return
    try:
        yield _encoded(_Guarded(source, item), item, _path_of(source))
    finally:
        with named_unreadable(item):
            source.seek(place)


def _path_of(source: Stream) -> str:
    """Where the file stands that is read: where its name is the path of that very file, and no class of the caller's lies between."""
    if type(source) is not io.BufferedReader or type(source.raw) is not io.FileIO:
        return ""
    name = source.name
    with suppress(OSError, ValueError):
        if isinstance(name, str) and os.path.samestat(os.stat(name), os.fstat(source.fileno())):
            return name
    return ""


class _Guarded:
    """A file, with failures that name it: neither a disk nor a class of the caller's is trusted to do as files do."""

    def __init__(self, file: Stream, item: str) -> None:
        self._file, self._item = file, item

    def read(self, size: int = -1, /) -> bytes:
        """Bytes from where it stands."""
        return _bytes_of(self._file, size, self._item)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go elsewhere; where it then stands, which not every file says itself."""
        with named_unreadable(self._item):
            self._file.seek(offset, whence)
        return self.tell()

    def tell(self) -> int:
        """Where it stands."""
        with named_unreadable(self._item):
            place = self._file.tell()
        return _checked(place, self._item)


def _name(source: Readable) -> str:
    with named_unreadable("file"):
        name = getattr(source, "name", None)
    return name[:200] if isinstance(name, str) and name else "file"


def _rewound(source: Stream, item: str) -> int | None:
    """Go to the beginning and say where the file was; None where it cannot seek."""
    with named_unreadable(item):
        try:
            place = source.tell()
            source.seek(0)
        except OSError:
            return None
    return _checked(place, item)


def _checked(place: object, item: str) -> int:
    """A place in a file, as it says itself."""
    # where 64 bits end
    if not whole(place, 0) or int(place) >= 2**63:
        raise InputError(f"tells its place as {shown(place)}, expected a whole number of bytes; pass what is in it, as bytes", item=item)
    return int(place)


def _drained(source: Readable, limits: Limits, item: str) -> bytes:
    parts: list[bytes] = []
    count = 0
    # a pipe or a socket gives what has come so far, and nothing only at its end
    while data := _bytes_of(source, limits.held_bytes + 1 - count, item):
        parts.append(data)
        count += len(data)
        limits.check_bytes(count, item)
    return b"".join(parts)


def _bytes_of(source: Readable, size: int, item: str) -> bytes:
    with named_unreadable(item):
        data = source.read(size)
    if not isinstance(data, bytes):
        raise InputError("gives no bytes; open it in binary mode ('rb')", item=item)
    if len(data) > size >= 0:
        raise InputError(f"gives {len(data):,} bytes where {size:,} were asked for; pass what is in it, as bytes", item=item)
    return data


def _encoded(stream: Stream, item: str, path: str = "") -> Encoded:
    with named_unreadable(item):
        head = stream.read(HEAD)
        size = stream.seek(0, io.SEEK_END)
        stream.seek(0)
    return Encoded(stream, item, kind_of(head, item), size, path)


@contextmanager
def named_unreadable(item: str) -> Iterator[None]:
    """Turn whatever an object of the caller's raises into an InputError that names it; held around calls into that object alone."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        # no list would be whole: the object is another program's (a socket, an archive, a bucket), and so is what it raises
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        raise InputError(f"cannot be read: {reason}", item=item) from error
