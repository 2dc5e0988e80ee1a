"""data: and file: addresses."""

import binascii
import re
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit
from urllib.request import url2pathname

from mmsdk.errors import InputError
from mmsdk.vision.intake.limits import Limits

__all__ = ["file_path", "read_data_uri"]

_SPACE = re.compile(r"\s+")
_TO_STANDARD = str.maketrans("-_", "+/")


def read_data_uri(uri: str, limits: Limits) -> bytes:
    """The bytes of a data: URI (RFC 2397).

    Scheme, type and the word base64 may be in any case; base64 may be of the standard or the URL-safe alphabet, broken over lines,
    percent-encoded, and without its padding. What the type claims is not trusted: the content decides. Raises InputError for other
    damage, and for more bytes than `limits.held_bytes`, before they are decoded.
    """
    header, comma, body = uri.partition(",")
    if not comma:
        raise InputError("a comma is expected between its type and its data; there is none", item="data URI")
    parts = [part.strip().lower() for part in header[len("data:") :].split(";")]
    limits.check_bytes(len(body) * 3 // 4 if "base64" in parts[1:] else len(body.replace("%", "")) // 3, "data URI")
    if "base64" not in parts[1:]:
        data = _unquoted(body)
        limits.check_bytes(len(data), "data URI")
        return data
    return _base64(unquote(body) if "%" in body else body)


def _unquoted(text: str) -> bytes:
    try:
        return unquote_to_bytes(text)
    except UnicodeEncodeError as error:
        raise InputError(f"holds {text[error.start]!r}, which is no letter", item="data URI") from None


def _base64(text: str) -> bytes:
    digits = _SPACE.sub("", text).rstrip("=").translate(_TO_STANDARD)
    try:
        return binascii.a2b_base64(digits + "=" * (-len(digits) % 4), strict_mode=True)
    except ValueError as error:
        raise InputError(f"its base64 is damaged: {error}", item="data URI") from None


def file_path(uri: str, allowed: bool) -> Path:
    """The path that a file: URI names; InputError where such URIs are not allowed, or where it names no file or another machine."""
    if not allowed:
        raise InputError(
            "file: addresses are not followed; pass the path itself, or allow them: mmsdk.load(address, access=mmsdk.Access(files=True))",
            item=uri[:200],
        )
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise InputError(f"not an address that can be read: {error}", item=uri[:200]) from None
    if parts.netloc.lower() not in {"", "localhost"}:
        raise InputError(f"the file is on another machine ({parts.netloc})", item=uri[:200])
    path = url2pathname(parts.path)
    if not path.strip():
        raise InputError("an address without a path; name the picture's or the clip's file", item=uri[:200])
    return Path(path)
