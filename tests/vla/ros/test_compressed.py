"""Compressed pictures by OpenCV's encoder, as compressed_image_transport uses it."""

from collections.abc import Callable

import cv2
import numpy as np
import pytest

from mmsdk.errors import InputError
from mmsdk.vision.intake.limits import Limits
from mmsdk.vla.ros.compressed import Format, compressed_picture, parse_format
from mmsdk.vla.ros.messages import CompressedImage, Header, Message, Time

HEADER = Header(Time(5, 0), "camera")


def scene() -> np.ndarray:
    """RGB: red on the left, blue on the right."""
    pixels = np.zeros((16, 24, 3), np.uint8)
    pixels[:, :12, 0], pixels[:, 12:, 2] = 250, 250
    return pixels


def encoded(ending: str, pixels: np.ndarray) -> bytes:
    """imencode takes channels as blue, green, red, whatever they are."""
    return cv2.imencode(ending, pixels)[1].tobytes()


def shown(message: object) -> np.ndarray:
    return compressed_picture(message).pixels.permute(1, 2, 0).numpy()


@pytest.mark.parametrize(
    "text", ["png", "bgr8; png compressed bgr8", "rgb8; png compressed bgr8", "rgb8;png compressed bgr8 ", "mono8; png"]
)
def test_what_was_compressed_as_bgr_is_a_plain_picture(text: str, heard: Callable[[Message], object]) -> None:
    data = encoded(".png", scene()[..., ::-1])
    assert np.array_equal(shown(heard(CompressedImage(HEADER, text, data))), scene())


def test_vr_20_jpeg_keeps_red_red(heard: Callable[[Message], object]) -> None:
    for text in ("jpeg", "jpg", "rgb8; jpeg compressed bgr8", "bgr8; jpeg compressed bgr8"):
        picture = shown(heard(CompressedImage(HEADER, text, encoded(".jpg", scene()[..., ::-1]))))
        assert np.abs(picture[8, 4].astype(int) - (250, 0, 0)).max() < 8 and np.abs(picture[8, 20].astype(int) - (0, 0, 250)).max() < 8


@pytest.mark.parametrize("text", ["rgb8; png compressed rgb8", "rgba8; png compressed rgb8"])
def test_what_was_compressed_as_rgb_is_turned_back(text: str) -> None:
    """As the transport's own subscriber does: the encoder took red for blue."""
    assert np.array_equal(shown(CompressedImage(HEADER, text, encoded(".png", scene()))), scene())


def test_grey_has_three_equal_channels() -> None:
    grey = shown(CompressedImage(HEADER, "mono8; png compressed mono8", encoded(".png", scene()[..., 0])))
    assert np.array_equal(grey, scene()[..., :1].repeat(3, -1))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("jpeg", Format("JPEG")),
        ("rgb8; jpeg compressed bgr8", Format("JPEG", "rgb8")),
        ("rgb8; jpeg compressed rgb8", Format("JPEG", "rgb8", True)),
        ("mono16; png compressed mono16", Format("PNG", "mono16")),
        ("bayer_rggb8; jpeg compressed bgr8", Format("JPEG", "bayer_rggb8")),
    ],
)
def test_formats_are_taken_apart(text: str, found: Format) -> None:
    assert parse_format(text) == found


@pytest.mark.parametrize("text", ["", ";", "rgb8", "rgb8; ", "webp", "h264", "rgb8; rvl compressed", "x" * 5000])
def test_other_formats_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="/camera: the format .* is not read") as error:
        compressed_picture(CompressedImage(HEADER, text, b"\xff\xd8\xff"), item="/camera")
    assert len(str(error.value)) < 200


def test_damage_size_and_lies_are_refused_by_the_topics_name() -> None:
    png = encoded(".png", scene())
    cases = {
        "says that it is JPEG, but is PNG": CompressedImage(HEADER, "jpeg", png),
        "truncated": CompressedImage(HEADER, "png", png[:-20]),
        "there are no bytes": CompressedImage(HEADER, "png", b""),
        "not a picture": CompressedImage(HEADER, "png", b"nothing at all"),
        "subscribe to the raw topic": CompressedImage(HEADER, "16UC1; compressedDepth png", b"\0" * 12 + png),
    }
    for told, message in cases.items():
        with pytest.raises(InputError, match=f"/camera: .*{told}"):
            compressed_picture(message, item="/camera")
    with pytest.raises(InputError, match=r"/camera: .*Limits.pixels"):
        compressed_picture(CompressedImage(HEADER, "png", png), Limits(pixels=100), "/camera")
    with pytest.raises(InputError, match=r"/camera: .*Limits.held_bytes"):
        compressed_picture(CompressedImage(HEADER, "png", png), Limits(held_bytes=10), "/camera")
