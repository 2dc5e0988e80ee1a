"""Messages as bytes: msgpack with NumPy arrays as openpi lays them out, decoded as if a stranger had sent them.

[published] (openpi-client, `msgpack_numpy`) An array is the map {b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [h, a]},
a NumPy number the map {b"__npgeneric__": True, b"data": number, b"dtype": "<f4"}. Nothing in a message can name code: no pickle, no
objects, no extension types. Sizes are checked before anything is built of them.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from mmsdk.errors import InputError

__all__ = ["Array", "decode", "encode", "flat"]

Array = npt.NDArray[Any]

# By their exact names: what else numpy can make of a string (records, objects, dates) is none of a message's business.
_DTYPES = MappingProxyType(
    {
        name: np.dtype(name)
        for name in ("|b1", "|u1", "|i1", *(f"{order}{kind}{size}" for order in "<>" for kind in "iuf" for size in (2, 4, 8)))
    }
)
_TEXT = re.compile(r"[<>]U[0-9]{1,5}")
_LONGEST_TEXT = 2**16
_MOST_ENTRIES = 2**10
_MOST_DIMENSIONS = 8
_LARGEST_SIZE = 2**31
_DEEPEST = 8


def encode(message: Mapping[str, object]) -> bytes:
    """A message as bytes. Raises InputError for an array that is not of numbers."""
    packed: bytes = msgpack.packb(message, default=_packed)
    return packed


def decode(data: bytes) -> dict[str, object]:
    """The message in bytes; arrays are the caller's own, writable and in this machine's byte order.

    Text is at most 64 KiB, a list or map at most 1,024 entries long: a few bytes cannot ask for much memory. Raises InputError for
    whatever is not such a message.
    """
    try:
        message = msgpack.unpackb(
            data,
            object_pairs_hook=_map,
            ext_hook=_extension,
            strict_map_key=True,
            max_str_len=_LONGEST_TEXT,
            max_bin_len=len(data),
            max_array_len=_MOST_ENTRIES,
            max_map_len=_MOST_ENTRIES,
            max_ext_len=0,
        )
    except InputError:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        raise InputError(f"{len(data)} bytes that cannot be read: {str(error) or type(error).__name__}", item="message") from None
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise InputError(f"a {type(message).__name__}, expected a map whose keys are texts", item="message")
    return message


def flat(message: Mapping[Any, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The values of a message by their path: {"a": {"b": 1}} is ("a/b", 1). Raises InputError for keys that are no text, and for depth."""
    if prefix.count("/") > _DEEPEST:
        raise InputError(f"more than {_DEEPEST} maps inside of each other", item="message")
    for key, value in message.items():
        if not isinstance(key, str):
            raise InputError(f"the key {repr(key)[:60]} is no text", item="message")
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value


def _packed(value: object) -> object:
    """What msgpack does not know by itself."""
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.str not in _DTYPES:
        raise InputError(f"a {value.dtype if isinstance(value, np.ndarray) else type(value).__name__} cannot be sent", item="message")
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}


def _map(pairs: Sequence[tuple[object, object]]) -> object:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InputError("a key stands twice in one map", item="message")
    if b"__ndarray__" in found:
        return _array(found)
    if b"__npgeneric__" in found:
        return _number(found)
    return found


def _array(found: Mapping[object, object]) -> object:
    data, name, shape = found.get(b"data"), found.get(b"dtype"), found.get(b"shape")
    if not (isinstance(data, bytes) and isinstance(name, str) and isinstance(shape, list)):
        raise InputError("an array without data, dtype or shape", item="message")
    if len(shape) > _MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < _LARGEST_SIZE for size in shape):
        raise InputError(f"an array of shape {str(shape)[:80]}", item="message")
    if _TEXT.fullmatch(name):
        return _text(data, name, shape)
    if name not in _DTYPES:
        raise InputError(f"an array of {name[:20]!r}; numbers can be sent: {', '.join(_DTYPES)}", item="message")
    dtype = _DTYPES[name]
    if math.prod(shape) * dtype.itemsize != len(data):
        raise InputError(f"{len(data)} bytes for an array of shape {shape} of {name}", item="message")
    if dtype.kind == "b":
        # any byte but 0 is true, and becomes a 1
        return np.ndarray(shape, np.uint8, data).astype(np.bool_)
    return np.ndarray(shape, dtype, data).astype(dtype.newbyteorder("="))


def _text(data: bytes, name: str, shape: list[int]) -> str:
    """One text as NumPy keeps it, which is how data sets hand out prompts."""
    dtype = np.dtype(name)
    if shape or len(data) != dtype.itemsize or len(data) > 4 * _LONGEST_TEXT:
        raise InputError(
            f"{len(data)} bytes for an array of shape {shape} of {name}; of texts, only single ones can be sent", item="message"
        )
    order = "utf-32-le" if name[0] == "<" else "utf-32-be"
    return data.decode(order).rstrip("\0")


def _number(found: Mapping[object, object]) -> bool | int | float:
    value, name = found.get(b"data"), found.get(b"dtype")
    if not isinstance(value, bool | int | float) or not isinstance(name, str) or name not in _DTYPES:
        raise InputError("a NumPy number that is none", item="message")
    return value


def _extension(code: int, data: bytes) -> object:
    raise InputError(f"extension type {code}: nothing but msgpack's own types can be sent", item="message")
