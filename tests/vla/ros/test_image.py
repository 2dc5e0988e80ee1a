"""Raw pictures through ROS's own bytes: every encoding, padded rows, both byte orders, and sizes that lie."""

import dataclasses
from array import array
from collections.abc import Callable
from tracemalloc import get_traced_memory, start, stop

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmsdk.errors import InputError
from mmsdk.vision.intake.limits import Limits
from mmsdk.vla.ros.encodings import encoding_of
from mmsdk.vla.ros.image import depth_of, image_message, numbers_of, octets, picture_of
from mmsdk.vla.ros.messages import Header, Image, Message, Time

ENCODINGS = {
    "rgb8": ("u1", 3),
    "bgr8": ("u1", 3),
    "rgba8": ("u1", 4),
    "bgra8": ("u1", 4),
    "mono8": ("u1", 1),
    "mono16": ("u2", 1),
    "rgb16": ("u2", 3),
    "bgra16": ("u2", 4),
    "16UC1": ("u2", 1),
    "32FC1": ("f4", 1),
    "64FC2": ("f8", 2),
    "8SC3": ("i1", 3),
    "bayer_rggb8": ("u1", 1),
    "bayer_gbrg16": ("u2", 1),
    "yuv422": ("u1", 2),
}
HEADER = Header(Time(5, 0), "camera")
SIZE = (4, 6)


def drawn(kind: str, channels: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    random = np.random.default_rng(7)
    return random.integers(0, 100, (*size, channels)).astype(kind)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("big", [False, True], ids=["little", "big"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_comes_back_the_same(name: str, big: bool, padding: int, heard: Callable[[Message], object]) -> None:
    kind, channels = ENCODINGS[name]
    pixels = drawn(kind, channels)
    row = SIZE[1] * pixels.itemsize * channels
    sent = image_message(pixels, name, HEADER, row + padding, big)
    assert (sent.height, sent.width, sent.step, sent.is_bigendian, len(sent.data)) == (*SIZE, row + padding, big, (row + padding) * 4)
    # NumPy writes the other byte order by itself; rows without their padding are its bytes
    lines = np.frombuffer(sent.data, np.uint8).reshape(4, -1)
    assert lines[:, :row].tobytes() == pixels.astype(np.dtype(kind).newbyteorder(">" if big else "<")).tobytes()
    back = numbers_of(heard(sent))
    assert back.dtype.newbyteorder("=") == np.dtype(kind) and np.array_equal(back, pixels) and not back.flags.writeable


def test_nothing_is_copied_of_bytes_and_arrays() -> None:
    sent = image_message(drawn("u1", 3), "rgb8", HEADER)
    held = np.frombuffer(sent.data, np.uint8)
    assert np.shares_memory(numbers_of(dataclasses.replace(sent)), held)
    for data in (array("B", sent.data), memoryview(sent.data), bytearray(sent.data), list(sent.data)):
        assert np.array_equal(octets(data), held)
    wild = memoryview(array("d", [1.0]))
    with pytest.raises(InputError, match="format 'd'"):
        octets(wild)
    with pytest.raises(InputError, match="0 to 255"):
        octets([1, 256])


@pytest.mark.parametrize("name", ["rgb8", "bgr8", "rgba8", "bgra8", "rgb16", "bgra16"])
def test_vr_20_red_is_red_whatever_the_encoding(name: str, heard: Callable[[Message], object]) -> None:
    kind, channels = ENCODINGS.get(name, ("u1", 3))
    pixels = np.zeros((*SIZE, channels), kind)
    pixels[1, 2, 0 if name.startswith("rgb") else 2] = 255 if kind == "u1" else 65535
    picture = picture_of(heard(image_message(pixels, name, HEADER, 80)))
    assert picture.shape == (*SIZE, 3) and picture[1, 2].tolist() == [255, 0, 0] and int(picture.sum()) == 255


def test_vr_20_channels_without_names_are_not_guessed() -> None:
    message = image_message(np.full((2, 2, 3), (1, 2, 3), np.uint8), "8UC3", HEADER)
    with pytest.raises(InputError, match="8UC3 does not say what its numbers mean"):
        picture_of(message)
    assert picture_of(message, unnamed="rgb")[0, 0].tolist() == [1, 2, 3] and picture_of(message, unnamed="bgr")[0, 0].tolist() == [3, 2, 1]
    for name, kind in (("16UC1", "u2"), ("32FC1", "f4"), ("64FC2", "f8")):
        with pytest.raises(InputError, match="no picture as it stands"):
            picture_of(image_message(drawn(kind, ENCODINGS[name][1]), name), unnamed="bgr")


@pytest.mark.parametrize("big", [False, True])
def test_grey_is_repeated_and_sixteen_bits_are_scaled(big: bool) -> None:
    assert picture_of(image_message(np.full((2, 3), 77, np.uint8), "mono8"))[1, 2].tolist() == [77, 77, 77]
    values = np.array([[0, 257, 65535]], np.uint16)
    assert picture_of(image_message(values, "mono16", is_bigendian=big))[0, :, 1].tolist() == [0, 1, 255]


@pytest.mark.parametrize("pattern", ["rggb", "bggr", "gbrg", "grbg"])
@pytest.mark.parametrize("bits", [8, 16])
def test_a_mosaic_of_one_colour_is_that_colour(pattern: str, bits: int) -> None:
    """The pattern names the pixels of the top left 2 x 2; laid out by hand, one colour must come back everywhere."""
    colour = {"r": 200, "g": 120, "b": 40}
    scale = 1 if bits == 8 else 257
    tile = np.array([[colour[pattern[0]], colour[pattern[1]]], [colour[pattern[2]], colour[pattern[3]]]])
    mosaic = (np.tile(tile, (4, 5)) * scale).astype(f"u{bits // 8}")
    picture = picture_of(image_message(mosaic, f"bayer_{pattern}{bits}", HEADER, 40))
    assert np.array_equal(picture, np.full((8, 10, 3), (200, 120, 40), np.uint8))


@pytest.mark.parametrize(("name", "luma"), [("yuv422", 1), ("uyvy", 1), ("yuv422_yuy2", 0), ("yuyv", 0)])
def test_shared_colours_are_unpacked(name: str, luma: int) -> None:
    """BT.601 video range by hand: Y 81, U 90, V 240 is red."""
    pixels = np.zeros((2, 4, 2), np.uint8)
    pixels[..., luma], pixels[:, 0::2, 1 - luma], pixels[:, 1::2, 1 - luma] = 81, 90, 240
    red = picture_of(image_message(pixels, name))
    assert np.abs(red.astype(int) - (255, 0, 0)).max() <= 2
    with pytest.raises(InputError, match="a width of 3"):
        picture_of(image_message(pixels[:, :3], name))


def test_depth_is_in_metres_and_unknown_is_nan(heard: Callable[[Message], object]) -> None:
    millimetres = np.array([[0, 1500], [250, 65535]], np.uint16)
    for big in (False, True):
        depth = depth_of(heard(image_message(millimetres, "16UC1", HEADER, 9, big)))
        torch.testing.assert_close(depth, torch.tensor([[float("nan"), 1.5], [0.25, 65.535]]), equal_nan=True)
    metres = np.array([[np.nan, -np.inf], [np.inf, 0.75]], np.float32)
    assert np.array_equal(depth_of(heard(image_message(metres, "32FC1", HEADER, 12, True))).numpy(), metres, equal_nan=True)
    with pytest.raises(InputError, match="rgb8 is no depth"):
        depth_of(image_message(drawn("u1", 3), "rgb8"))


HUGE = 2**32 - 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"height": HUGE, "width": HUGE, "step": HUGE}, "at most 100,000,000 are decoded"),
        ({"height": 10_000, "width": 10_000, "step": 30_000}, "the message is truncated or its size is wrong"),
        ({"height": 0}, "at least one pixel"),
        ({"width": 7}, "a step of 18 bytes, but 7 pixels of rgb8 are 21"),
        ({"step": 17}, "a step of 17 bytes"),
        ({"data": b"\0" * 71}, "71 bytes of data, but 4 rows of 18 bytes are 72"),
        ({"data": b""}, "0 bytes of data"),
        ({"encoding": "8UC512"}, "a step of 18 bytes"),
        ({"encoding": "8UC513"}, "is not read"),
        ({"encoding": "nv12"}, "the encoding 'nv12' is not read"),
        ({"encoding": ""}, "is not read"),
        ({"encoding": "bgr8" + "x" * 10_000}, "is not read"),
    ],
)
def test_sizes_that_lie_are_refused_before_memory_is_set_aside(changes: dict[str, object], told: str) -> None:
    message = dataclasses.replace(image_message(drawn("u1", 3), "rgb8", HEADER), **changes)
    start()
    try:
        with pytest.raises(InputError, match=told) as error:
            picture_of(message, item="/camera")
        assert get_traced_memory()[1] < 200_000
    finally:
        stop()
    assert str(error.value).startswith("/camera: ") and len(str(error.value)) < 600


def test_limits_of_intake_hold_for_raw_pictures() -> None:
    with pytest.raises(InputError, match=r"Limits.pixels"):
        numbers_of(image_message(drawn("u1", 3), "rgb8"), Limits(pixels=23))


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 40), st.integers(0, 90), st.sampled_from(sorted(ENCODINGS)), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_message_is_read_or_refused(height: int, width: int, step: int, count: int, name: str, big: bool) -> None:
    message = Image(HEADER, height, width, name, int(big), step, bytes(count))
    try:
        assert picture_of(message, unnamed="rgb").shape == (height, width, 3)
    except InputError:
        return
    assert height * step == count


def test_numbers_of_another_type_are_not_written() -> None:
    with pytest.raises(InputError, match="mono16: uint8 of shape"):
        image_message(drawn("u1", 1), "mono16")
    with pytest.raises(InputError, match="shorter than a row of 18"):
        image_message(drawn("u1", 3), "rgb8", HEADER, 17)
    assert encoding_of("32SC4").dtype == "i4" and encoding_of("bayer_grbg16").pattern == "grbg"


def test_a_padded_row_is_no_pixel_for_opencv_either() -> None:
    """OpenCV's own step is the outside truth: a view into a wider picture, as cv_bridge publishes regions of interest."""
    whole = drawn("u1", 3, (8, 10))
    region = whole[2:6, 3:9]
    message = Image(HEADER, 4, 6, "bgr8", 0, 30, whole[2:6].reshape(-1)[9 : 9 + 4 * 30].tobytes() + b"\0" * 9)
    assert np.array_equal(picture_of(message), cv2.cvtColor(np.ascontiguousarray(region), cv2.COLOR_BGR2RGB))
