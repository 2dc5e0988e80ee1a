"""From what a user names to encoded bytes: a path, bytes, a file object, a data URI."""

import base64
import binascii
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable
from urllib.parse import unquote_to_bytes

from mmsdk.errors import InputError
from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.intake.url import Web, fetch

__all__ = ["Encoded", "Readable", "Written", "encoded"]

HEAD = 65_536


@runtime_checkable
class Readable(Protocol):
    """A file object opened for reading bytes."""

    def read(self, size: int = -1, /) -> bytes: ...


Written = str | os.PathLike[str] | bytes | bytearray | memoryview | Readable


@dataclass(frozen=True, slots=True)
class Encoded:
    """A picture or clip as it was stored: a file that stays where it is, or bytes in memory; `name` is for messages."""

    name: str
    content: Path | bytes

    def open(self) -> BinaryIO:
        """The content from its first byte; the caller closes it."""
        if isinstance(self.content, bytes):
            return io.BytesIO(self.content)
        try:
            return self.content.open("rb")
        except OSError as error:
            raise InputError(f"the file cannot be read ({error.strerror})", item=self.name) from error

    def head(self) -> bytes:
        """The first bytes, enough to tell what the content is."""
        with self.open() as file:
            return file.read(HEAD)

    def size(self) -> int:
        """How many bytes there are."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


def encoded(source: Written, limits: Limits, web: Web) -> Encoded:
    """Find the bytes of a source. A file is not read yet; all else is, up to `limits.bytes`.

    Raises InputError for what is missing, empty, too large, or not allowed (addresses on the web, file URIs).
    """
    found = _found(source, limits, web)
    if found.size() == 0:
        raise InputError("there are no bytes in it (a file object that was read before needs seek(0))", item=found.name)
    return found


def _found(source: Written, limits: Limits, web: Web) -> Encoded:
    if isinstance(source, bytes | bytearray | memoryview):
        limits.check_bytes(memoryview(source).nbytes, "bytes")
        return Encoded("bytes", bytes(source))
    if isinstance(source, str):
        return _text(source, limits, web)
    if isinstance(source, os.PathLike):
        return _path(Path(source))
    return Encoded("file object", _read(source, limits))


def _text(source: str, limits: Limits, web: Web) -> Encoded:
    scheme = source.lstrip()[:8].lower()
    if scheme.startswith("data:"):
        return Encoded("data URI", _data_uri(source, limits))
    if scheme.startswith(("http://", "https://")):
        return Encoded(source.strip(), fetch(source.strip(), web, limits))
    if scheme.startswith("file:"):
        raise InputError("file URIs are not followed; pass the path itself", item=source[:80])
    return _path(Path(source))


def _path(path: Path) -> Encoded:
    # a path with a zero byte, or far too long, is a mistake in the input and not in the file system
    try:
        if path.is_file():
            return Encoded(str(path), path)
        there = path.exists()
    except (OSError, ValueError) as error:
        raise InputError(f"this is no path ({error})", item=str(path)[:80]) from error
    raise InputError("this is a folder or device, expected a file" if there else "there is no such file", item=str(path)[:200])


def _read(file: Readable, limits: Limits) -> bytes:
    pieces: list[bytes] = []
    total = 0
    while piece := file.read(min(2**20, limits.bytes + 1 - total)):
        if not isinstance(piece, bytes):
            raise InputError(f"the file object gives {type(piece).__name__}, expected bytes; open it in mode 'rb'", item="file object")
        total += len(piece)
        limits.check_bytes(total, "file object")
        pieces.append(piece)
    return b"".join(pieces)


def _data_uri(source: str, limits: Limits) -> bytes:
    kind, comma, payload = source.strip()[len("data:") :].partition(",")
    if not comma:
        raise InputError("there is no comma between the type and the data", item="data URI")
    mime, *parameters = (part.strip().lower() for part in kind.split(";"))
    if mime and not mime.startswith(("image/", "video/", "application/octet-stream")):
        raise InputError(f"the type is {mime}, expected image/... or video/...", item="data URI")
    # base64 is four characters for three bytes; refused before it is decoded
    limits.check_bytes(len(payload) * 3 // 4 if "base64" in parameters else len(payload) // 3, "data URI")
    if "base64" not in parameters:
        return unquote_to_bytes(payload)
    letters = re.sub(r"\s+", "", unquote_to_bytes(payload).decode("latin-1")).rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        return base64.b64decode(letters + "=" * (-len(letters) % 4), validate=True)
    except binascii.Error as error:
        raise InputError(f"the data is not base64 ({error})", item="data URI") from error
