"""Clips given as frames: odd times and rates are named, and the notes on single frames are those of the clip."""

import datetime
import io
import itertools
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial

import jaxtyping
import numpy as np
import PIL.Image
import pytest
import torch

from mmsdk.errors import InputError
from mmsdk.vision.intake import Access, Frames, Limits, Sampling, load, load_image, load_video
from mmsdk.vision.types import Image, Video

GREY = np.full((4, 6, 3), 9, np.uint8)
PIXELS = torch.zeros(3, 3, 4, 4, dtype=torch.uint8)
ALL = Sampling(frames=1000)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of types at every call, as users run it."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


class Lost(list[object]):
    """A list of the caller's that cannot even say how long it is."""

    def __len__(self) -> int:
        raise KeyError("gone")


def times(value: object) -> Callable[[], object]:
    return lambda: load(Frames([GREY] * 3, times=value))  # type: ignore[arg-type]  # the mistake under test


def fps(value: object) -> Callable[[], object]:
    return lambda: load(Frames([GREY] * 3, fps=value))  # type: ignore[arg-type]  # the mistake under test


def frames(value: object) -> Callable[[], object]:
    return lambda: load(Frames(value))  # type: ignore[arg-type]  # the mistake under test


def video(stamps: object, pixels: object = PIXELS) -> Callable[[], object]:
    return lambda: load(Video(pixels, stamps))  # type: ignore[arg-type]  # the mistake under test


def image(pixels: object) -> Callable[[], object]:
    return lambda: load(Image(pixels))  # type: ignore[arg-type]  # the mistake under test


def background(value: object) -> Callable[[], object]:
    return lambda: load_image(np.zeros((2, 2, 4), np.uint8), background=value)  # type: ignore[arg-type]  # the mistake under test


ODD: dict[str, Callable[[], object]] = {
    "times: None": times(None),
    "times: string": times("012"),
    "times: bytes": times(b"012"),
    "times: number": times(3),
    "times: dict": times({0: 1, 1: 2, 2: 3}),
    "times: set": times({0, 1, 2}),
    "times: strings": times(["0", "1", "2"]),
    "times: a None": times([0.0, None, 2.0]),
    "times: huge": times([0, 1, 10**400]),
    "times: endless digits": times([0, 1, 10**5000]),
    "times: 1e308": times([0, 1, 1e308]),
    "times: nan": times([0, 1, math.nan]),
    "times: infinite": times([0, 1, math.inf]),
    "times: tiny": times([0, 1e-320, 1]),
    "times: of today": times([1.7e9, 1.7e9 + 0.1, 1.7e9 + 0.2]),
    "times: few": times([0, 1]),
    "times: many": times([0, 1, 2, 3]),
    "times: endless": times(itertools.count()),
    "times: falling": times([2, 1, 0]),
    "times: equal": times([0, 1, 1]),
    "times: complex": times([0, 1, 2j]),
    "times: numpy complex": times(np.array([0, 1, 2j])),
    "times: table": times(np.zeros((3, 1))),
    "times: one array": times(np.float64(3)),
    "times: scalar": times(torch.tensor(3.0)),
    "times: dates": times([datetime.timedelta(seconds=s) for s in range(3)]),
    "times: meta": times(torch.zeros(3, device="meta")),
    "fps: None": fps(None),
    "fps: string": fps("2"),
    "fps: huge": fps(10**400),
    "fps: endless digits": fps(10**5000),
    "fps: tiny": fps(1e-320),
    "fps: small": fps(1e-300),
    "fps: 1e308": fps(1e308),
    "fps: nan": fps(math.nan),
    "fps: infinite": fps(math.inf),
    "fps: below": fps(-1),
    "fps: complex": fps(2j),
    "fps: list": fps([2.0]),
    "fps: array": fps(np.array([2.0])),
    "frames: length": frames(Lost([GREY])),
    "frames: dict": frames({0: GREY}),
    "frames: None": frames([None]),
    "video: None": video(None),
    "video: list": video([0.0, 1.0, 2.0]),
    "video: whole": video(torch.arange(3)),
    "video: nan": video(torch.tensor([0.0, 1.0, math.nan])),
    "video: equal": video(torch.zeros(3)),
    "video: flat": video(torch.zeros(3, 1)),
    "video: no pixels": video(torch.zeros(3), None),
    "image: no pixels": image(None),
    "image: list": image([[1]]),
    "image: array": image(GREY),
    "image: sparse": image(PIXELS[0].to_sparse()),
    "image: meta": image(PIXELS[0].to("meta")),
    "sampling: string": partial(Sampling, frames="8"),
    "sampling: nan": partial(Sampling, frames=math.nan),
    "sampling: infinite": partial(Sampling, frames=math.inf),
    "sampling: huge": partial(Sampling, frames=10**400),
    "sampling: list": partial(Sampling, frames=[8]),
    "sampling: fps string": partial(Sampling, fps="2"),
    "sampling: fps huge": partial(Sampling, fps=10**400),
    "sampling: fps list": partial(Sampling, fps=[2.0]),
    "limits: None": partial(Limits, pixels=None),
    "limits: string": partial(Limits, pixels="9"),
    "limits: nan": partial(Limits, pixels=math.nan),
    "limits: half": partial(Limits, pixels=2.5),
    "limits: true": partial(Limits, pixels=True),
    "limits: endless": partial(Limits, pixels=math.inf),
    "access: string": partial(Access, hosts="example.org"),
    "access: None": partial(Access, hosts=None),
    "access: numbers": partial(Access, hosts=(5,)),
    "access: network": partial(Access, networks="10.1.0.0/16"),
    "access: no network": partial(Access, networks=None),
    "access: nan": partial(Access, seconds=math.nan),
    "access: endless": partial(Access, seconds=math.inf),
    "access: no time": partial(Access, seconds=None),
    "access: redirects": partial(Access, redirects=-1),
    "access: half": partial(Access, redirects=0.5),
    "background: name": background("red"),
    "background: None": background(None),
    "background: nan": background((0, 0, math.nan)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_times_rates_and_settings_are_input_errors_that_name_their_item(name: str) -> None:
    with pytest.raises(InputError) as caught:
        ODD[name]()
    words, item, about = str(caught.value), caught.value.item, name.partition(":")[0]
    assert item == {"times": "frames", "fps": "frames", "frames": item}.get(about, about) and 20 < len(words) < 200
    assert about not in ("times", "fps") or about in words or "time" in words


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("times: None", "frames: times is None, expected a list of seconds"),
        ("times: strings", "time 0 is '0', expected a finite number"),
        ("times: endless", "more than 3 times for 3 frames"),
        ("times: huge", "time 2 is 1000"),
        ("times: of today", "count from the first frame"),
        ("fps: tiny", "fps is 1e-320"),
        ("fps: endless digits", "too long to show"),
        ("frames: None", "frame 0: NoneType is no picture"),
        ("frames: length", "KeyError"),
    ],
)
def test_the_message_says_what_is_wrong(name: str, told: str) -> None:
    with pytest.raises(InputError, match=re.escape(told)):
        ODD[name]()


@pytest.mark.parametrize(
    "stamps",
    [
        (0, 1, 2),
        [Fraction(0), Fraction(1), Fraction(2)],
        [Decimal(0), np.float32(1), torch.tensor(2.0)],
        np.arange(3),
        torch.arange(3.0, dtype=torch.float64),
        range(3),
        itertools.chain([0.0, 1.0], [2.0]),
    ],
    ids=["whole", "fractions", "mixed", "array", "tensor", "range", "iterator"],
)
def test_times_of_every_kind_of_number_are_taken_as_they_are(stamps: Sequence[float]) -> None:
    """VI-09."""
    assert load_video(Frames([GREY] * 3, times=stamps)).times.tolist() == [0.0, 1.0, 2.0]


def test_times_may_be_negative_and_need_not_begin_at_nought() -> None:
    assert load_video(Frames([GREY] * 3, times=(-1.5, 0.25, 1000.5))).times.tolist() == [-1.5, 0.25, 1000.5]


@pytest.mark.parametrize("fps", [1e300, Fraction(5, 2), 1e-300])
def test_any_rate_of_sampling_takes_frames_in_order(fps: float) -> None:
    """VI-07: a rate is never too high or too low to be met."""
    chosen = Sampling(fps=fps).indices(100, 10.0)
    assert chosen == (list(range(100)) if fps == 1e300 else list(range(0, 100, 4)) if fps == Fraction(5, 2) else [0])
    assert Sampling(fps=1e308).indices(2, 1e-5) == [0, 1]


def test_a_whole_number_of_frames_may_be_a_float() -> None:
    assert Sampling(frames=4.0).indices(8, 1.0) == [1, 3, 5, 7]  # type: ignore[arg-type]  # as a division gives it


def small(level: int) -> PIL.Image.Image:
    return PIL.Image.fromarray(np.full((4, 6), level, np.int32))


def pages(*pictures: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    pictures[0].save(file, "TIFF", save_all=True, append_images=pictures[1:])
    return file.getvalue()


def test_what_was_assumed_of_a_page_is_told_of_the_clip() -> None:
    (note,) = load_image(small(7)).notes
    assert load_video(pages(small(7), small(200)), sampling=ALL).notes == (note,)
    clip = load_video(pages(small(7), small(5000), small(9)), sampling=ALL)
    assert clip.notes == (f"frame 0, 2: {note}",) and clip.frames[:, 0, 0, 0].tolist() == [7, 19, 9]
    assert load_video(pages(small(5000), small(6000)), sampling=ALL).notes == ()


def test_what_was_assumed_of_a_frame_is_told_of_the_clip() -> None:
    (note,) = load_image(small(7)).notes
    assert load_video([small(7), small(8)]).notes == (note,)
    many = [small(7) if place % 2 else small(5000) for place in range(40)]
    assert load_video(many, sampling=ALL).notes == (f"frame 1, 3, 5, 7, 9, 11, 13, 15 and 12 more: {note}",)
    mine = Image(torch.zeros(3, 4, 6, dtype=torch.uint8), "mine", ("cropped",))
    assert load_video(Frames([GREY, mine], times=(0.0, 1.0))).notes == ("frame 1: cropped",)


def test_an_array_that_is_no_clip_tells_its_shape() -> None:
    with pytest.raises(InputError, match=r"\(4, 6, 3\) is no clip"):
        load_video(GREY)


def test_a_clip_of_its_own_making_is_taken_as_it_is() -> None:
    clip = Video(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0.0, 0.5], dtype=torch.float64))
    assert load(clip) is clip
