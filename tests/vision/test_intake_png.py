"""IN-03: what a PNG declares transparent shows the background, whatever its bits: PNGs written here by the specification."""

import io
import struct
import zlib

import cv2
import numpy as np
import PIL.Image
import pytest

from mmsdk.vision.intake import load_image

BACK = (10, 20, 30)
GREY, COLOUR, PALETTE = 0, 2, 3


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(rows: list[bytes], width: int, depth: int, kind: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """Rows that are packed already, none of them filtered."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, len(rows), depth, kind, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunk(*one) for one in chunks) + body + chunk(b"IEND", b"")


def packed(values: list[int], depth: int) -> bytes:
    return int("".join(f"{value:0{depth}b}" for value in values), 2).to_bytes(len(values) * depth // 8, "big")


def hwc(source: object, background: tuple[int, int, int] = BACK) -> np.ndarray:
    return load_image(source, background=background).pixels.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("above", [0, 256])
def test_a_level_of_grey_of_any_depth(depth: int, above: int) -> None:
    """Every level is the transparent one in its turn; bits of the key above the depth do not count."""
    top = 2**depth - 1
    values = list(range(top + 1)) * (8 // min(8, top + 1))
    for key in {0, 1, top // 2, top}:
        data = png([packed(values, depth)], len(values), depth, GREY, (b"tRNS", struct.pack(">H", key + above * (depth > 1))))
        expected = [list(BACK) if value == key else [value * 255 // top] * 3 for value in values]
        assert hwc(data)[0].tolist() == expected
        with PIL.Image.open(io.BytesIO(data)) as picture:
            assert hwc(picture)[0].tolist() == expected


def test_sixteen_bits_of_grey() -> None:
    data = png([struct.pack(">4H", 0, 300, 301, 65535)], 4, 16, GREY, (b"tRNS", struct.pack(">H", 300)))
    assert hwc(data)[0].tolist() == [[0] * 3, list(BACK), [1] * 3, [255] * 3]


@pytest.mark.parametrize("depth", [8, 16])
def test_a_colour_is_compared_in_all_of_its_bits(depth: int) -> None:
    near = np.array([[[300, 301, 302], [300, 301, 303], [44, 45, 46], [299, 301, 302], [0, 0, 0]]])
    key = near[0, 0] % 2**depth
    data = png([(near % 2**depth).astype(f">u{depth // 8}").tobytes()], 5, depth, COLOUR, (b"tRNS", struct.pack(">3H", *key)))
    clear = (near % 2**depth == key).all(-1)[0]
    found = hwc(data)[0]
    assert (found[clear] == BACK).all() and clear.sum() == (1 if depth == 16 else 2)
    assert (found[~clear] != BACK).any(-1).all()


def test_sixteen_bits_of_colour_as_opencv_reads_them() -> None:
    """Large, filtered as an encoder filters, with a key that stands in many places, beside others that share its upper bytes."""
    values = np.random.default_rng(0).choice([1000, 1001, 40000], (50, 70, 3)).astype(np.uint16)
    done, coded = cv2.imencode(".png", values[..., ::-1])
    whole = coded.tobytes()
    at = whole.index(b"IDAT") - 4
    data = whole[:at] + chunk(b"tRNS", struct.pack(">3H", 1000, 1001, 40000)) + whole[at:]
    theirs = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    clear = theirs[..., 3] == 0
    assert done and 50 < clear.sum() < 300
    for source in (data, PIL.Image.open(io.BytesIO(data))):
        found = hwc(source)
        assert ((found == BACK).all(-1) == clear).all()
        assert np.abs(found[~clear].astype(int) - theirs[..., 2::-1][~clear].astype(int) // 257).max() <= 1


def test_sixteen_bits_that_were_read_before_are_compared_in_what_is_left_of_them() -> None:
    data = png([struct.pack(">6H", 300, 301, 302, 600, 301, 302)], 2, 16, COLOUR, (b"tRNS", struct.pack(">3H", 300, 301, 302)))
    with PIL.Image.open(io.BytesIO(data)) as picture:
        picture.load()
    assert hwc(picture)[0].tolist() == [list(BACK), [2, 1, 1]]
    assert picture.info["transparency"] == (300, 301, 302)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_a_palette_of_which_several_entries_are_clear_or_half_so(depth: int) -> None:
    count = min(2**depth, 4)
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 200)][:count]
    alphas = [0, 128, 0, 255][:count]
    values = [place % count for place in range(8)]
    plte = bytes(part for colour in colours for part in colour)
    data = png([packed(values, depth)], 8, depth, PALETTE, (b"PLTE", plte), (b"tRNS", bytes(alphas)))
    found = hwc(data)[0].astype(float)
    alpha = np.array(alphas)[values, None] / 255
    assert np.abs(found - (np.array(colours)[values] * alpha + np.array(BACK) * (1 - alpha))).max() <= 0.5


def test_without_a_key_nothing_is_clear() -> None:
    assert hwc(png([packed([0, 1, 2, 3], 2)], 4, 2, GREY))[0, :, 0].tolist() == [0, 85, 170, 255]
