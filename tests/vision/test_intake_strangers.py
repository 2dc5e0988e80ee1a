"""What nobody should hand over and somebody will: other layouts and ranges, files that cannot be read, pictures already closed."""

import gzip
import http.client
import io
import json
import mmap
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from typing import NoReturn

import jaxtyping
import numpy as np
import PIL.Image
import pytest
import torch
from torch._subclasses import FakeTensorMode

from mmsdk.errors import InputError
from mmsdk.vision.intake import Access, Frames, Limits, check, load, load_all, load_image, load_video
from mmsdk.vision.types import Image, Video

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 10, 3), dtype=np.uint8)


def png(pixels: np.ndarray = PIXELS) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def hwc(source: object, **settings: object) -> np.ndarray:
    image = load(source, **settings)
    assert isinstance(image, Image)
    return image.pixels.permute(1, 2, 0).numpy()


def test_where_both_ends_could_be_channels_an_array_is_hwc_and_a_tensor_chw() -> None:
    for shape in ((3, 3, 3), (3, 7, 3), (1, 5, 3), (4, 4, 3)):
        square = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
        assert (hwc(square) == square).all()
        if shape[0] == 3:
            assert (hwc(torch.from_numpy(square)) == square.transpose(1, 2, 0)).all()


@pytest.mark.parametrize(
    "same",
    [
        PIXELS.astype(">u2") * np.uint16(257),
        PIXELS.astype("<u2") * np.uint16(257),
        (PIXELS / 255).astype(">f8"),
        (PIXELS / 255).astype(np.float32) + np.float32(1e-6),
        PIXELS.astype(">i4"),
        PIXELS.astype(np.uint64),
        torch.from_numpy(PIXELS / 255).permute(2, 0, 1).requires_grad_(),
        torch.from_numpy(PIXELS.copy()).permute(2, 0, 1).to(torch.int16),
        torch.from_numpy(np.ascontiguousarray(PIXELS.transpose(2, 0, 1))).contiguous(),
    ],
    ids=["big-endian", "little-endian", "big float", "a little over 1", "big int", "uint64", "needs grad", "int16", "chw"],
)
def test_other_types_and_orders_of_bytes_are_the_same_picture(same: object) -> None:
    assert (hwc(same) == PIXELS).all()


def test_masks_half_floats_and_arrays_with_rules_of_their_own() -> None:
    mask = np.eye(4, dtype=bool)
    assert (hwc(mask)[..., 0] == np.eye(4) * 255).all() and (hwc(torch.from_numpy(mask)) == hwc(mask)).all()
    assert (hwc(np.ma.array(np.eye(4, dtype=np.uint8) * 9))[..., 2] == np.eye(4) * 9).all()
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        steps = torch.tensor([[0.0, 0.25, 0.5, 1.0]])
        assert hwc(steps.to(dtype))[0, :, 0].tolist() == [0, 64, 128, 255]


@pytest.mark.parametrize(
    ("array", "fix"),
    [
        (np.array([[0.5, np.nan]]), "nan_to_num"),
        (np.array([[0.5, np.inf]], np.float32), "nan_to_num"),
        (np.array([[0.0, 254.0]]), "divide by 255"),
        (np.array([[-1.0, 1.0]]), "below 0"),
        (np.array([[-3, 4]], np.int16), "below 0"),
        (np.array([[0, 300]]), "uint16"),
        (np.zeros((4, 4), complex), "complex"),
        (np.zeros((4, 4), object), "object"),
        (np.zeros((4, 4), "U3"), "U3"),
        (np.zeros((5, 6, 2), np.uint8), "1, 3 or 4 channels"),
        (np.frombuffer(png(), np.uint8), "tobytes"),
        (np.zeros((), np.uint8), "h w c"),
        (np.zeros((4, 0, 3), np.uint8), "no picture"),
        (np.zeros((2, 2, 2, 2, 2), np.uint8), "no picture"),
        (torch.zeros(4, 4, dtype=torch.complex64).conj(), "complex"),
        (torch.zeros(3, 4, 4).to_sparse(), "dense"),
        (torch.zeros(3, 4, 4, device="meta"), "meta"),
        (torch.tensor(3.0), "h w c"),
    ],
)
def test_numbers_that_are_no_pixels_are_named_with_the_fix(array: np.ndarray | torch.Tensor, fix: str) -> None:
    with pytest.raises(InputError, match=fix) as error:
        load(array)
    assert error.value.item in {"array", "tensor"}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_give_no_numbers_are_named() -> None:
    for layout in (torch.strided, torch.jagged):
        for part in (torch.zeros(4, 4), torch.zeros(3, 4, 4)):
            with pytest.raises(InputError, match="nested"):
                load(torch.nested.nested_tensor([part, part], layout=layout))
    with FakeTensorMode():
        fake = torch.zeros(3, 4, 4)
    with pytest.raises(InputError, match="tensor: FakeTensor .* make it a plain tensor"):
        load(fake)


def test_what_is_masked_is_neither_shown_nor_passed_over() -> None:
    """A mask of which nothing is set is none."""
    grey = np.eye(4, dtype=np.uint8)
    for masked, told in (
        (np.ma.masked_equal(grey, 1), r"array: 4 of its 16 values are masked.*filled\(0\)"),
        (np.ma.array(np.zeros((4, 4, 3)), mask=True), "48 of its 48"),
        (np.ma.array([(1, 2)], dtype=[("a", "u1"), ("b", "u1")], mask=[(True, False)]), "no picture"),
    ):
        with pytest.raises(InputError, match=told):
            load(masked)
    assert (hwc(np.ma.masked_greater(grey, 1))[..., 0] == grey).all()
    clip = np.ma.array(np.zeros((2, 4, 4, 3), np.uint8), mask=False)
    assert len(load_video(clip).frames) == 2
    clip[1, 0, 0, 0] = np.ma.masked
    for frames in (clip, [clip[0], clip[1]]):
        with pytest.raises(InputError, match="frame 1: 1 of its 48 values"):
            load_video(frames)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_a_masked_tensor_is_told_how_it_is_filled() -> None:
    part = torch.ones(3, 4, 4, dtype=torch.float32)
    with pytest.raises(InputError, match=r"tensor: a masked tensor.*to_tensor\(0\)"):
        load(torch.masked.MaskedTensor(part, part > 2))


def test_huge_arrays_are_refused_by_their_size_and_not_by_their_channels() -> None:
    """IN-14: a view of one number costs nothing, and would be gigabytes as pixels."""
    for shape in ((60_000, 60_000, 3), (3, 60_000, 60_000), (60_000, 60_000)):
        for endless in (np.broadcast_to(np.uint8(7), shape), torch.tensor(7, dtype=torch.uint8).expand(shape)):
            with pytest.raises(InputError, match="3,600,000,000 pixels"):
                load(endless)


def test_a_background_that_is_no_colour_is_named() -> None:
    glass = np.zeros((2, 2, 4), np.uint8)
    for colour in ((0, 0, 300), (-1, 0, 0)):
        with pytest.raises(InputError, match="background"):
            load_image(glass, background=colour)


def test_paths_with_spaces_and_letters_of_any_script(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "été 2 %20 #1?"
    folder.mkdir()
    for name in ("mon chat 猫 🧿.png", "-dash.png", "data.png", os.fsdecode(b"not\xffutf8.png")):
        (folder / name).write_bytes(png())
        for path in (folder / name, str(folder / name)):
            assert (hwc(path) == PIXELS).all()
    with os.scandir(os.fsencode(folder)) as entries:
        assert all((hwc(entry) == PIXELS).all() for entry in entries)


class Named:
    """An entry of a folder that is called as it likes."""

    def __init__(self, name: str | bytes) -> None:
        self.name = name

    def __fspath__(self) -> str | bytes:
        return self.name


def test_files_that_are_none_are_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("This is no picture.")
    os.mkfifo(tmp_path / "pipe.png")
    for source, told in (
        (tmp_path / "missing.png", "no such file"),
        (tmp_path / "empty.jpg", "empty"),
        (tmp_path / "text.jpg", "not a picture or a clip"),
        (tmp_path, "a folder"),
        (tmp_path / "pipe.png", "a pipe"),
        (tmp_path / "empty.jpg" / "a.png", "cannot be opened"),
        ("", "^'': an empty path"),
        (" \n", "an empty path"),
        (Named(""), "an empty path"),
        (Named(b" "), "an empty path"),
        ("a\0b.png", "not a path"),
        (png().hex() * 9, "data:image/png;base64"),
    ):
        with pytest.raises(InputError, match=told) as error:
            load(source)
        assert error.value.item
        with pytest.raises(InputError, match=told):
            check(source)


@pytest.mark.parametrize(
    "address", ["file:", "file://localhost", "file://[", "data:,\udc80", "data:;base64,\udc80", "http:", "https://[", "http://\udc80/"]
)
def test_addresses_of_nothing_are_named(address: str) -> None:
    with pytest.raises(InputError) as error:
        load(address, access=Access(hosts=("*",), files=True))
    assert error.value.item and "folder" not in str(error.value)


@pytest.mark.parametrize("name", ["sampling", "limits", "access"])
def test_settings_of_another_kind_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # without the check of types at every call, as users run it
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    calls: list[Callable[..., object]] = [load, load_video, lambda source, **how: load_all([source], **how)]
    for call in calls if name == "sampling" else [*calls, load_image, check]:
        for value in (5, None, "all"):
            with pytest.raises(InputError, match=rf"^{name}: it is .*, expected {name}=mmsdk\.\w+\(\.\.\.\), or nothing"):
                call("nowhere.png", **{name: value})


def test_an_address_may_have_space_around_it() -> None:
    with pytest.raises(InputError, match="not among the hosts"):
        load(" https://example.org/a.png\n")


def test_open_files_of_every_kind_are_read_and_left_where_they_were(tmp_path: pathlib.Path) -> None:
    path, packed = tmp_path / "a.png", tmp_path / "a.zip"
    path.write_bytes(png())
    with zipfile.ZipFile(packed, "w") as archive:
        archive.write(path, "a.png")
    with (
        path.open("rb") as plain,
        path.open("rb", buffering=0) as raw,
        path.open("r+b") as both,
        zipfile.ZipFile(packed) as archive,
        archive.open("a.png") as member,
        gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(png()))) as zipped,
        tempfile.SpooledTemporaryFile() as spooled,
        mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        spooled.write(png())
        for file in (plain, raw, both, member, zipped, spooled, mapped):
            file.seek(5)
            assert (hwc(file) == PIXELS).all()
            assert file.tell() == 5


def test_a_file_that_cannot_go_back_is_read_to_its_end() -> None:
    read, write = os.pipe()
    os.write(write, png())
    os.close(write)
    with open(read, "rb") as pipe:
        assert (hwc(pipe) == PIXELS).all()


def test_open_files_that_cannot_be_read_are_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png())
    closed = path.open("rb")
    closed.close()
    cut = gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(np.random.default_rng(0).bytes(5000))[:2000]))
    with path.open(encoding="latin-1") as text, (tmp_path / "new.png").open("wb") as writing:
        for file, told in ((closed, "closed"), (text, "binary mode"), (writing, "cannot be read"), (cut, "cannot be read")):
            with pytest.raises(InputError, match=told):
                load(file)


class Failing(io.BytesIO):
    """A file that fails, at one of its methods, as no file of Python's own would."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__(png())
        setattr(self, method, self.fail)
        self.error = error

    def fail(self, *_: object) -> NoReturn:
        raise self.error


@pytest.mark.parametrize("method", ["read", "seek", "tell"])
@pytest.mark.parametrize("error", [http.client.IncompleteRead(b"abc"), RuntimeError("gone"), TypeError("gone"), KeyError("gone")])
def test_whatever_a_file_raises_names_it_and_leaves_the_batch_alone(method: str, error: Exception) -> None:
    found, other = load_all([Failing(method, error), PIXELS])
    assert isinstance(found, InputError) and "item 1 (index 0, file): cannot be read" in str(found) and type(error).__name__ in str(found)
    assert isinstance(other, Image)
    for stop in (KeyboardInterrupt(), MemoryError()):
        with pytest.raises(type(stop)):
            load(Failing(method, stop))


def test_a_path_that_raises_is_named() -> None:
    class Lost:
        def __fspath__(self) -> str:
            raise RuntimeError("no such bucket")

    with pytest.raises(InputError, match="Lost: cannot be read: RuntimeError: no such bucket"):
        load(Lost())


def test_views_of_bytes_of_any_stride() -> None:
    doubled = bytearray(2 * len(png()))
    doubled[::2] = png()
    assert (hwc(memoryview(doubled)[::2]) == PIXELS).all()
    gone = memoryview(png())
    gone.release()
    with pytest.raises(InputError, match="bytes"):
        load(gone)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM"])
def test_a_pil_image_that_was_closed_too_early_says_so(tmp_path: pathlib.Path, kind: str) -> None:
    path = tmp_path / "a"
    PIL.Image.fromarray(PIXELS).save(path, kind)
    with PIL.Image.open(path) as picture:
        pass
    with pytest.raises(InputError, match=r"closed before its pixels were read.*load\(\)"):
        load(picture)
    with PIL.Image.open(path) as picture:
        picture.load()
    assert hwc(picture).shape == PIXELS.shape


@pytest.mark.parametrize("mode", ["HSV", "YCbCr", "LAB", "LA", "La", "PA", "RGBa", "RGBX", "CMYK", "P", "1", "L", "I;16", "F"])
def test_a_pil_image_of_any_mode_is_a_picture_or_an_error_that_names_the_mode(mode: str) -> None:
    picture = PIL.Image.new(mode, (3, 2))
    (found,) = load_all([picture])
    # whether PIL converts these depends on its version
    named = mode in {"LAB", "La"} and f"mode {mode}" in str(found)
    assert named or (isinstance(found, Image) and found.size == (2, 3))


def test_32_bits_with_values_of_8_are_taken_as_8_with_a_note_and_16_bits_are_scaled() -> None:
    small = load_image(PIL.Image.fromarray(np.array([[0, 100, 255]], np.int32)))
    assert small.pixels[0].tolist() == [[0, 100, 255]] and "8 bits" in small.notes[0]
    for deep in (PIL.Image.fromarray(np.array([[0, 257, 65535]], np.int32)), PIL.Image.fromarray(np.array([[0, 257, 65535]], np.uint16))):
        image = load_image(deep)
        assert image.pixels[0].tolist() == [[0, 1, 255]] and not image.notes
    dark = load_image(b"P5 2 1 65535\n\x00\x00\x00\xff")
    assert dark.pixels[0].tolist() == [[0, 1]] and not dark.notes


def test_the_transparent_level_of_a_16_bit_png_shows_the_background() -> None:
    file = io.BytesIO()
    PIL.Image.fromarray(np.array([[0, 300, 301, 65535]], np.uint16)).save(file, "PNG", transparency=300)
    assert hwc(file, background=(9, 8, 7))[0].tolist() == [[0, 0, 0], [9, 8, 7], [1, 1, 1], [255, 255, 255]]


def test_a_pil_image_is_read_at_the_frame_where_it_stands() -> None:
    file = io.BytesIO()
    frames = [PIL.Image.new("RGB", (4, 4), (level, 0, 0)) for level in (0, 100, 200)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    with PIL.Image.open(file) as picture:
        picture.seek(2)
        assert hwc(picture)[0, 0, 0] == 200 and picture.tell() == 2


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        (Frames(PIXELS), r"\(6, 10, 3\) is no clip"),
        (Frames("clip.mp4"), "load_video reads files"),
        (Frames([PIXELS, PIXELS[:3]]), "one size"),
        (Frames([PIXELS, np.full((6, 10), np.nan)]), "frame 1"),
        (Frames([PIXELS] * 2, times=(0.0,)), "1 times for 2"),
        (Frames([PIXELS] * 2, times=(1.0, 1.0)), "rising"),
        (Frames([PIXELS] * 2, times=(0.0, float("nan"))), "finite"),
        (Frames([PIXELS] * 2, fps=0.0), "above 0"),
        ([PIXELS, "missing.png"], r"frame 1 \(missing.png\): there is no such file"),
    ],
)
def test_frames_that_are_no_clip_are_named(frames: object, told: str) -> None:
    with pytest.raises(InputError, match=told):
        load_video(frames)


# Without the checks of types that tests run under: what a user sees who passes what the signature does not allow.
STRANGERS = """
import io, json, os, torch, numpy as np
from mmsdk.errors import InputError
from mmsdk.vision.intake import Frames, Sampling, check, load, load_image, load_video
from mmsdk.vision.types import Image, Video

class Odd:
    def __fspath__(self): return b"missing.png"

class Silent:
    def read(self, size=-1): return None

class Lost(list):
    def __getitem__(self, index): raise KeyError(index)

grey = torch.zeros(3, 4, 4, dtype=torch.uint8)
strangers = {
    "none": None, "number": 5, "dictionary": {}, "object": object(), "generator": (x for x in ()), "nested": [[1]], "set": {1},
    "iterator": iter([grey]), "mapped": map(str, ["a.png"]), "endless digits": 10**5000, "truth": True, "checked": lambda: check(None),
    "as picture": lambda: load_image([grey]), "clip as picture": lambda: load_image(Video(grey[None], torch.zeros(1))),
    "as clip": lambda: load_video(None), "picture as clip": lambda: load_video({"bytes": b""}),
    "scalar": np.float64(3), "frames of a generator": Frames(iter([])), "frames of none": Frames(None), "odd path": Odd(),
    "silent": Silent(),
    "float image": Image(torch.rand(3, 4, 4)), "flat image": Image(grey[0]), "image of an array": Image(grey.permute(1, 2, 0)),
    "few times": Video(grey[None], torch.zeros(2)), "image as video": Video(grey, torch.zeros(3)),
    "lost frames": Frames(Lost([grey])), "class": lambda: load(io.BytesIO), "class checked": lambda: check(io.BytesIO),
    "half a frame": lambda: Sampling(frames=2.5),
}
told = {}
for name, stranger in strangers.items():
    try:
        stranger() if callable(stranger) else load(stranger)
        told[name] = "accepted"
    except InputError as error:
        told[name] = str(error)
print(json.dumps(told))
"""


def test_what_is_no_source_at_all_is_an_input_error_too() -> None:
    done = subprocess.run([sys.executable, "-c", STRANGERS], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert len(told) == 30 and not [name for name, words in told.items() if words == "accepted" or not 20 < len(words) < 200]
    for name, hint in (
        ("none", "NoneType"),
        ("number", "int"),
        ("odd path", "no such file"),
        ("silent", "binary"),
        ("few times", "2"),
        ("lost frames", "KeyError: 0"),
        ("none", "source: NoneType is no picture; expected a path, bytes"),
        ("number", "source: int 5 is no picture"),
        ("dictionary", "source: dict is no picture"),
        ("dictionary", "under one of its keys"),
        ("set", "source: set is no picture"),
        ("set", "no order"),
        ("generator", "source: generator is no picture"),
        ("generator", "list(...)"),
        ("mapped", "source: map is no picture"),
        ("nested", "frame 0: list is no picture"),
        ("as picture", "load_video reads clips"),
        ("clip as picture", "source: Video is no picture"),
        ("as clip", "source: NoneType is no clip; expected a video"),
        ("checked", "NoneType"),
    ):
        assert hint in told[name]
    assert "uint8" in told["float image"] and "3 h w" in told["image of an array"]


def test_vi_01_an_image_or_a_clip_without_pixels_is_named() -> None:
    nothing = torch.zeros(0, 3, 4, 4, dtype=torch.uint8)
    for void in (Video(nothing, torch.zeros(0), "void"), Image(torch.zeros(3, 0, 4, dtype=torch.uint8), "void")):
        with pytest.raises(InputError, match="void: has no pixels"):
            load(void)


def test_limits_hold_for_what_is_already_in_memory() -> None:
    with pytest.raises(InputError, match="clip_pixels"):
        load_video([PIXELS] * 4, limits=Limits(clip_pixels=239))
    assert load_video([PIXELS] * 4, limits=Limits(clip_pixels=240)).frames.shape == (4, 3, 6, 10)
