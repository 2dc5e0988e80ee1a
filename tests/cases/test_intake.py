"""Image intake: public bug reports turned into required behaviour, one test a case."""

import base64
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import PIL.features
import PIL.Image
import PIL.ImageFile
import pytest
import torch

from mmsdk.errors import InputError
from mmsdk.vision.intake import Access, Limits, Sampling, load, load_all, load_image, load_video
from mmsdk.vision.intake.limits import LIMITS
from mmsdk.vision.intake.url import fetch
from mmsdk.vision.types import Image


def corners() -> np.ndarray:
    """24 x 40, one colour a quarter, so that no turn looks like another."""
    pixels = np.zeros((24, 40, 3), np.uint8)
    pixels[:12, :20], pixels[:12, 20:], pixels[12:, :20], pixels[12:, 20:] = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)
    return pixels


def stored(turned: int) -> PIL.Image.Image:
    """The picture as a camera with this orientation stores it."""
    methods = {
        2: PIL.Image.Transpose.FLIP_LEFT_RIGHT,
        3: PIL.Image.Transpose.ROTATE_180,
        4: PIL.Image.Transpose.FLIP_TOP_BOTTOM,
        5: PIL.Image.Transpose.TRANSPOSE,
        6: PIL.Image.Transpose.ROTATE_90,
        7: PIL.Image.Transpose.TRANSVERSE,
        8: PIL.Image.Transpose.ROTATE_270,
    }
    upright = PIL.Image.fromarray(corners())
    return upright.transpose(methods[turned]) if turned in methods else upright


def written(picture: PIL.Image.Image, kind: str, turned: int = 0, **settings: int) -> bytes:
    file = io.BytesIO()
    exif = PIL.Image.Exif()
    if turned:
        exif[0x0112] = turned
        picture.save(file, kind, exif=exif.tobytes(), **settings)
    else:
        picture.save(file, kind, **settings)
    return file.getvalue()


def hwc(image: object) -> np.ndarray:
    assert isinstance(image, Image)
    return image.pixels.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("turned", range(1, 9))
def test_in_01_every_exif_orientation_is_turned_upright(turned: int, tmp_path: Path) -> None:
    data = written(stored(turned), "JPEG", turned, quality=100, subsampling=0)
    (tmp_path / "a.jpg").write_bytes(data)
    uri = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    for source in (tmp_path / "a.jpg", str(tmp_path / "a.jpg"), data, io.BytesIO(data), uri):
        found = hwc(load(source))
        assert found.shape == (24, 40, 3)
        assert np.abs(found.astype(int) - corners()).max() <= 4


@pytest.mark.parametrize(("kind", "turned"), [("PNG", 8), ("WEBP", 3)])
def test_in_02_png_and_webp_tell_an_orientation_too(kind: str, turned: int) -> None:
    settings = {"lossless": 1} if kind == "WEBP" else {}
    assert (hwc(load(written(stored(turned), kind, turned, **settings))) == corners()).all()


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x63\0\0"]
)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_in_02_damaged_or_unknown_exif_counts_as_upright(kind: str, exif: bytes) -> None:
    file = io.BytesIO()
    PIL.Image.fromarray(corners()).save(file, kind, exif=exif)
    assert load(file).pixels.shape == (3, 24, 40)


def test_in_03_alpha_is_laid_over_the_background() -> None:
    rgba = np.array([[[255, 0, 0, 0], [255, 0, 0, 128]], [[255, 0, 0, 255], [255, 0, 0, 255]]], np.uint8)
    for source in (rgba, written(PIL.Image.fromarray(rgba), "PNG"), PIL.Image.fromarray(rgba), torch.from_numpy(rgba).permute(2, 0, 1)):
        found = hwc(load(source)).astype(int)
        assert found[0, 0].tolist() == [255, 255, 255] and found[1, 0].tolist() == [255, 0, 0]
        assert np.abs(found[0, 1] - [255, 127, 127]).max() <= 1
    assert hwc(load_image(rgba, background=(0, 0, 255)))[0, 0].tolist() == [0, 0, 255]


def test_in_03_a_palette_with_a_transparent_entry_is_laid_over_the_background() -> None:
    palette = PIL.Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 255, 0])
    palette.putpixel((1, 0), 1)
    file = io.BytesIO()
    palette.save(file, "PNG", transparency=0)
    assert hwc(load(file)).tolist() == [[[255, 255, 255], [0, 255, 0]]]


def test_in_04_grey_and_bilevel_have_three_equal_channels() -> None:
    grey = PIL.Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    found = hwc(load(written(grey, "PNG")))
    assert (found == np.asarray(grey)[..., None]).all()
    bits = hwc(load(written(grey.convert("1"), "PNG")))
    assert set(bits.ravel().tolist()) == {0, 255} and (bits[..., 0] == bits[..., 2]).all()


def test_in_05_sixteen_bits_are_scaled() -> None:
    deep = np.array([[0, 32768, 65535]], np.uint16)
    for source in (written(PIL.Image.fromarray(deep), "PNG"), PIL.Image.fromarray(deep), deep, torch.from_numpy(deep)):
        assert np.abs(hwc(load(source))[0, :, 0].astype(int) - [0, 128, 255]).max() <= 1


def test_in_06_cmyk() -> None:
    red = PIL.Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    found = hwc(load(written(red, "JPEG", quality=95))).reshape(-1, 3)
    assert (found[:, 0] > 200).all() and (found[:, 1:] < 60).all()


def gif(count: int, size: int = 8) -> bytes:
    frames = [PIL.Image.new("RGB", (size, size), (place * 255 // max(1, count - 1), 0, 0)) for place in range(count)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=100, loop=0)
    return file.getvalue()


def test_in_07_an_animation_as_a_picture_is_its_first_frame_with_a_note() -> None:
    image = load(gif(3))
    assert isinstance(image, Image) and image.pixels.max() == 0 and "first of several frames" in image.notes[0]
    assert load(gif(1)).notes == ()


def test_in_10_corrupt_bytes_name_their_place_and_leave_the_others_alone() -> None:
    noise = np.random.default_rng(0).bytes(1000)
    first, second, third = load_all([corners(), noise, corners()])
    assert isinstance(first, Image) and isinstance(third, Image)
    assert isinstance(second, InputError) and second.index == 1 and "not a picture or a clip" in str(second)


@pytest.mark.parametrize("tolerant", [False, True])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_in_11_a_truncated_file_is_an_error_and_no_grey(kind: str, tolerant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = PIL.Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    data = written(noisy, kind)
    # another library of the same process may have asked PIL to paint what is missing
    monkeypatch.setattr(PIL.ImageFile, "LOAD_TRUNCATED_IMAGES", tolerant)
    with pytest.raises(InputError, match="truncated"):
        load(data[: len(data) * 6 // 10])
    assert PIL.ImageFile.LOAD_TRUNCATED_IMAGES is tolerant and PIL.Image.MAX_IMAGE_PIXELS == 89478485


def test_in_12_every_way_in_gives_the_same_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    data = written(PIL.Image.fromarray(pixels), "PNG")
    (tmp_path / "wrong.mp4").write_bytes(data)
    with (tmp_path / "wrong.mp4").open("rb") as file:
        sources = [
            tmp_path / "wrong.mp4", str(tmp_path / "wrong.mp4"), data, bytearray(data), memoryview(data), io.BytesIO(data), file,
            PIL.Image.fromarray(pixels), pixels, pixels.transpose(2, 0, 1), pixels / 255, (pixels / 255).astype(np.float32),
            torch.from_numpy(pixels), torch.from_numpy(pixels).permute(2, 0, 1), torch.from_numpy(pixels) / 255, pixels.astype(np.int64),
            "data:image/png;base64," + base64.b64encode(data).decode(), Image(torch.from_numpy(pixels).permute(2, 0, 1)),
        ]  # fmt: skip
        for source in sources:
            assert (hwc(load(source)) == pixels).all(), type(source)


def test_in_13_data_uris_as_they_are_written_in_the_wild() -> None:
    data = written(PIL.Image.fromarray(corners()), "PNG")
    text = base64.b64encode(data).decode()
    spaced = "\n ".join(text[place : place + 40] for place in range(0, len(text), 40))
    url_safe = base64.urlsafe_b64encode(data).decode()
    for uri in (
        f"DATA:IMAGE/PNG;BASE64,{text}",
        f"data:image/png;base64,{text.rstrip('=')}",
        f"data:image/png;base64,{url_safe}",
        f"data:image/png;base64, {spaced}\n",
    ):
        assert (hwc(load(uri)) == corners()).all()
    for bad in ("data:text/plain;base64,aGVsbG8gd29ybGQ=", "data:image/png;base64,%%%", "data:image/png"):
        with pytest.raises(InputError):
            load(bad)


def test_in_13_file_addresses_are_read_only_where_they_are_permitted(tmp_path: Path) -> None:
    path = tmp_path / "a picture é.png"
    path.write_bytes(written(PIL.Image.fromarray(corners()), "PNG"))
    with pytest.raises(InputError, match=r"Access\(files=True\)"):
        load(path.as_uri())
    assert (hwc(load(path.as_uri(), access=Access(files=True))) == corners()).all()
    with pytest.raises(InputError, match="another machine"):
        load("file://elsewhere/a.png", access=Access(files=True))


def png_header(width: int, height: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    body = chunk(b"IDAT", zlib.compress(bytes(1_000_000), 9))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) + body + chunk(b"IEND", b"")


def test_in_14_a_decompression_bomb_is_refused_from_its_header() -> None:
    with pytest.raises(InputError, match="60000x60000 is 3,600,000,000 pixels, but at most 100,000,000"):
        load(png_header(60000, 60000))
    with pytest.raises(InputError, match="40x24"):
        load(written(PIL.Image.fromarray(corners()), "PNG"), limits=Limits(pixels=959))
    assert load(corners(), limits=Limits(pixels=960)).size == (24, 40)
    for pixels in (corners(), corners().transpose(2, 0, 1), torch.from_numpy(corners()), PIL.Image.fromarray(corners())):
        with pytest.raises(InputError, match="40x24"):
            load(pixels, limits=Limits(pixels=959))


def test_in_15_too_many_frames_stop_at_the_limit() -> None:
    with pytest.raises(InputError, match="more than 20 frames"):
        load_video(gif(30), limits=Limits(frames=20))
    clip = load_video(gif(10), sampling=Sampling(frames=5))
    assert clip.frames.shape == (5, 3, 8, 8)
    torch.testing.assert_close(clip.times, torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9]))


def test_in_15_what_is_drawn_for_an_animation_is_bounded() -> None:
    with pytest.raises(InputError, match=r"more than 20 frames \(Limits.drawn_frames\)"):
        load_video(gif(30), limits=Limits(drawn_frames=20))
    with pytest.raises(InputError, match=r"more than 1,900 pixels together \(Limits.drawn_pixels\)"):
        load_video(gif(30), limits=Limits(drawn_pixels=1900))
    assert len(load_video(gif(30), limits=Limits(drawn_frames=30, drawn_pixels=1920)).frames) == 8


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "AVIF"])
def test_frames_of_an_animation_begin_when_their_file_says(kind: str) -> None:
    if kind == "AVIF" and not PIL.features.check("avif"):
        pytest.skip("this Pillow comes without AVIF")
    pictures = [PIL.Image.new("RGB", (16, 16), (level, 0, 0)) for level in (0, 120, 240)]
    file = io.BytesIO()
    pictures[0].save(file, kind, save_all=True, append_images=pictures[1:], duration=[100, 300, 200], loop=0)
    video = load_video(file, sampling=Sampling(frames=3))
    torch.testing.assert_close(video.times, torch.tensor([0.0, 0.1, 0.4]))
    assert (video.frames.float().mean(dim=(2, 3))[:, 0] - torch.tensor([0.0, 120, 240])).abs().max() < 4
    # what is shown at 0, 0.2 and 0.4 s
    assert load_video(file, sampling=Sampling(fps=5.0)).times.tolist() == pytest.approx([0.0, 0.1, 0.4])


def test_in_16_the_web_is_closed_by_default_and_private_addresses_are_refused() -> None:
    with pytest.raises(InputError, match="Access"):
        load("https://example.org/a.png")
    with pytest.raises(InputError):
        fetch("http://a.test/", Access(hosts=("a.test",)), LIMITS, lambda host, port: ["169.254.169.254"])


def test_in_18_views_of_any_stride_are_read_and_never_changed() -> None:
    pixels = corners()
    frozen = pixels.copy()
    frozen.flags.writeable = False
    for view in (pixels[::-1], pixels[:, ::2], pixels[:, ::-1], frozen, np.asfortranarray(pixels)):
        before = view.copy()
        image = load(view)
        assert (hwc(image) == before).all()
        image.pixels.fill_(7)
        assert (view == before).all()
