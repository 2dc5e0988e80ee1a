"""What an input may cost: sizes that are checked before anything is decoded."""

import math
from dataclasses import dataclass, fields

from mmsdk.errors import InputError
from mmsdk.vision.values import shown, whole

__all__ = ["LIMITS", "Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one input; what goes over is an InputError that names the value and the bound.

    `held_bytes`: encoded bytes that are held in memory (pictures, data URIs, downloads, streams that cannot seek; clip files are read
    piece by piece and have no such bound). `pixels`: height x width of a picture or of a clip's frame. `frames`: frames that a clip may
    hold. `drawn_frames` and `drawn_pixels` (frames x height x width): of an animated picture, whose every frame is drawn upon the one
    before it. `clip_pixels`: frames x height x width of the frames that are kept; more than that does not fail, the frames are shrunk
    while they are read and a note says so.
    """

    held_bytes: int = 2**28
    pixels: int = 100_000_000
    frames: int = 500_000
    drawn_frames: int = 20_000
    drawn_pixels: int = 2**33
    clip_pixels: int = 2**27

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not whole(value, 1):
                raise InputError(f"{field.name} is {shown(value)}, expected a whole number of at least 1", item="limits")

    def check_bytes(self, count: int, item: str) -> None:
        """Raise InputError where `count` encoded bytes are more than may be held."""
        if count > self.held_bytes:
            raise InputError(f"{count:,} bytes, but at most {self.held_bytes:,} are read (Limits.held_bytes)", item=item)

    def check_size(self, height: int, width: int, item: str) -> None:
        """Raise InputError where a picture of this size has no pixel or more than allowed."""
        if height < 1 or width < 1:
            raise InputError(f"a picture has at least one pixel; this is {width}x{height}", item=item)
        if height * width > self.pixels:
            message = f"{width}x{height} is {height * width:,} pixels, but at most {self.pixels:,} are decoded (Limits.pixels)"
            raise InputError(message, item=item)

    def check_frames(self, count: int, item: str) -> None:
        """Raise InputError where a clip holds no frame or more than allowed."""
        if count < 1:
            raise InputError("a clip has at least one frame; this has none", item=item)
        if count > self.frames:
            raise InputError(f"more than {self.frames:,} frames (Limits.frames); cut the clip, or raise the limit", item=item)

    def check_drawn(self, frames: int, pixels: int, item: str) -> None:
        """Raise InputError where the frames of an animated picture, or their pixels together, are more than are drawn."""
        self.check_frames(frames, item)
        if frames > self.drawn_frames:
            raise InputError(f"an animation of more than {self.drawn_frames:,} frames (Limits.drawn_frames); make it a video", item=item)
        if pixels > self.drawn_pixels:
            told = f"an animation whose frames are more than {self.drawn_pixels:,} pixels together (Limits.drawn_pixels)"
            raise InputError(f"{told}; make it smaller or a video", item=item)

    def scale(self, frames: int, height: int, width: int) -> float:
        """How much each side of the kept frames shrinks so that they fit `clip_pixels`: 1.0 where they fit as they are."""
        return min(1.0, math.sqrt(self.clip_pixels / (frames * height * width)))


LIMITS = Limits()
