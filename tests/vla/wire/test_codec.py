"""Messages as bytes: the same as openpi's own code makes and reads, and nothing but an error for everything else."""

import contextlib
import pickle
from pathlib import Path
from types import ModuleType

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmsdk.errors import InputError
from mmsdk.vla.wire.codec import decode, encode, flat
from mmsdk.vla.wire.fields import Fields

ARRAYS = [
    np.arange(12, dtype=np.uint8).reshape(2, 2, 3),
    np.array(1.5),
    np.array(True),
    np.array([True, False]),
    np.array([[1.0, -0.0], [np.nan, np.inf]], dtype=np.float32),
    np.array([1, -2], dtype=np.int64),
    np.array([0.5], dtype=np.float16),
    np.array([1.0, 2.0], dtype=">f8"),
    np.zeros((0, 7)),
]


def same(one: object, other: object) -> bool:
    assert isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    equal = np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return equal and one.shape == other.shape and one.dtype.newbyteorder("=") == other.dtype.newbyteorder("=")


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype.str}{array.shape}")
def test_arrays_are_laid_out_as_openpis_code_does(openpi_client: ModuleType, array: np.ndarray) -> None:
    theirs = openpi_client.msgpack_numpy
    message = {"a": array, "b": {"c": "text", "d": 3, "e": [1, 2.5]}}
    assert encode(message) == theirs.packb(message)
    assert same(theirs.unpackb(encode(message))["a"], array)
    ours = decode(theirs.packb(message))
    assert same(ours["a"], array) and ours["b"] == message["b"]


def test_what_is_decoded_is_ones_own_and_can_be_written_to() -> None:
    for array in ARRAYS:
        found = decode(encode({"a": array}))["a"]
        assert isinstance(found, np.ndarray) and found.flags.writeable and found.dtype.isnative


@pytest.mark.parametrize("value", [np.float32(0.1), np.int16(-3), np.bool_(True), np.str_("lift"), np.array("lift it")])
def test_numpys_single_values_are_pythons(openpi_client: ModuleType, value: object) -> None:
    if isinstance(value, np.ndarray):
        # openpi's packer sends texts of any shape; here one alone is a prompt
        assert decode(openpi_client.msgpack_numpy.packb({"a": value})) == {"a": "lift it"}
    else:
        assert isinstance(value, np.generic)
        assert decode(openpi_client.msgpack_numpy.packb({"a": value})) == {"a": value.item()}


def array(**changed: object) -> bytes:
    fields = {"__ndarray__": True, "data": b"\0" * 8, "dtype": "<f4", "shape": [2], **changed}
    return msgpack.packb({"a": {key.encode(): value for key, value in fields.items()}})


class Exploit:
    """Writes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def nested(depth: int) -> object:
    return {"a": nested(depth - 1)} if depth else 1


HOSTILE = {
    "nothing": b"",
    "noise": bytes(range(256)),
    "cut": encode({"a": np.zeros(9)})[:-1],
    "more": encode({"a": 1}) + b"\0",
    "no map": msgpack.packb([1]),
    "not utf-8": b"\x81\xa1a\xa2\xff\xfe",
    "a key twice": b"\x82\xa1a\x01\xa1a\x02",
    "a huge list": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "a huge map": b"\x81\xa1a\xdf\xff\xff\xff\xff",
    "huge bytes": b"\x81\xa1a\xc6\xff\xff\xff\xff",
    "huge lists in each other": b"\x81\xa1a" + b"\xdd\x00\x10\x00\x00" * 300 + b"\xc0",
    "lists in each other": b"\x81\xa1a" + b"\x91" * 5000 + b"\xc0",
    "an extension": msgpack.packb({"a": msgpack.ExtType(5, b"x")}),
    "a time": msgpack.packb({"a": msgpack.Timestamp(1, 2)}),
    "a long text": msgpack.packb({"a": "x" * 100_000}),
    "objects": array(dtype="|O"),
    "records": array(dtype="f4,f4"),
    "void": array(dtype="|V8"),
    "dates": array(dtype="<M8[s]"),
    "complex": array(dtype="<c8", shape=[1]),
    "texts": array(dtype="<U1"),
    "half a text": array(dtype="<U3", shape=[]),
    "no text": array(dtype="<U2", shape=[], data=b"\xff" * 8),
    "a dtype that is none": array(dtype=b"<f4"),
    "too short": array(shape=[3]),
    "too long": array(shape=[1]),
    "below zero": array(shape=[-2]),
    "below zero twice": array(shape=[-1, -2]),
    "beyond any memory": array(shape=[2**62, 2**62, 0], data=b""),
    "beyond any number": array(shape=[2**64 - 1, 0], data=b""),
    "a shape of truths": array(shape=[True, 2]),
    "a shape of texts": array(shape=["2"]),
    "many dimensions": array(shape=[1] * 40 + [2]),
    "no data": array(data="text"),
    "a number of no kind": msgpack.packb({"a": {b"__npgeneric__": True, b"data": 1, b"dtype": ["<f4"]}}),
    "a number that is none": msgpack.packb({"a": {b"__npgeneric__": True, b"data": "x", b"dtype": "<f4"}}),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_vr_18_what_is_no_message_is_an_input_error(data: bytes) -> None:
    with pytest.raises(InputError):
        decode(data)


def test_vr_18_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    place = tmp_path / "written"
    payload = pickle.dumps(Exploit(str(place)))
    for data in (payload, msgpack.packb({"a": payload}), array(data=payload, dtype="|O", shape=[1])):
        try:
            Fields(decode(data)).array("a")
        except InputError:
            continue
        pytest.fail("a pickle went through")
    assert not place.exists()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_an_input_error(data: bytes) -> None:
    with contextlib.suppress(InputError):
        assert isinstance(decode(data), dict)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_messages_are_a_message_or_an_input_error(draw: st.DataObject) -> None:
    whole = bytearray(encode({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": {"c": "text"}, "d": np.float32(1)}))
    for _ in range(draw.draw(st.integers(1, 4))):
        whole[draw.draw(st.integers(0, len(whole) - 1))] = draw.draw(st.integers(0, 255))
    with contextlib.suppress(InputError):
        assert all(isinstance(path, str) for path, _ in flat(decode(bytes(whole))))


def test_what_cannot_be_sent_is_named() -> None:
    for value in (np.array([object()]), np.array([1j]), object()):
        with pytest.raises(InputError, match="cannot be sent"):
            encode({"a": value})


def test_maps_are_paths_and_two_ways_to_one_path_are_an_error() -> None:
    assert dict(flat({"a": {"b": 1, "c/d": 2}, "e": 3})) == {"a/b": 1, "a/c/d": 2, "e": 3}
    with pytest.raises(InputError, match="one path"):
        Fields({"a": {"b": 1}, "a/b": 2})
    with pytest.raises(InputError, match="inside of each other"):
        Fields(decode(msgpack.packb(nested(20))))
    with pytest.raises(InputError, match="is no text"):
        Fields(decode(msgpack.packb({"a": {b"b": 1}})))


def test_fields_have_the_type_that_is_asked_for_and_none_is_left_over() -> None:
    fields = Fields({"seed": True, "noise": np.zeros((2, 3)), "state": np.array([1, np.nan]), "promt": "x", "delay": -1, "due": ["vml"]})
    for read, told in [
        (lambda: fields.whole("seed", 0), "seed: True, expected a whole number"),
        (lambda: fields.matrix("noise", 4), r"noise: float64 of shape \(2, 3\), expected a NumPy array of rows of 4"),
        (lambda: fields.vector("state", 2), "state: it holds NaN"),
        (lambda: fields.text("prompt"), "prompt: missing.*promt"),
        (lambda: fields.whole("delay", 0, least=0), "delay: -1, expected a whole number from 0"),
        (lambda: fields.chosen("due", frozenset({"vlm"})), "due: .*some of vlm"),
    ]:
        with pytest.raises(InputError, match=told):
            read()
    with pytest.raises(InputError, match="promt: nobody asked for it; did you mean 'prompt'"):
        fields.end()
    fields.end(ignored=frozenset({"promt"}))
