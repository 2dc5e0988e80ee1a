"""What an input may cost: sizes that are checked before anything is decoded."""

from dataclasses import dataclass, fields

from mmsdk.errors import InputError

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one input; what goes over is an InputError that names the value and the bound.

    `bytes`: encoded bytes that are held in memory (pictures, data URIs, downloads, streams that cannot seek; clip files are read piece by
    piece and have no such bound). `pixels`: height x width of a picture or of a clip's frame. `frames`: frames that a clip may hold,
    taken or not. `clip_pixels`: frames x height x width of the frames that are taken; more than that does not fail: the frames are
    shrunk while they are read, and a note says so.
    """

    bytes: int = 2**28
    pixels: int = 100_000_000
    frames: int = 500_000
    clip_pixels: int = 2**27

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise InputError(f"{field.name} is at least 1; got {value}", item="limits")

    def check_bytes(self, count: int, item: str) -> None:
        """Raise InputError where `count` encoded bytes are more than may be held."""
        if count > self.bytes:
            raise InputError(f"{count:,} bytes, but at most {self.bytes:,} are read (Limits.bytes)", item=item)

    def check_size(self, height: int, width: int, item: str) -> None:
        """Raise InputError where a picture of this size has no pixel or more than allowed."""
        if height < 1 or width < 1:
            raise InputError(f"a picture has at least one pixel; this is {width}x{height}", item=item)
        if height * width > self.pixels:
            message = f"{width}x{height} is {height * width:,} pixels, but at most {self.pixels:,} are decoded (Limits.pixels)"
            raise InputError(message, item=item)

    def check_clip(self, frames: int, height: int, width: int, item: str) -> None:
        """Raise InputError where the frames that are taken have more pixels together than are held."""
        if frames * height * width > self.clip_pixels:
            message = f"{frames} frames of {width}x{height} are more than {self.clip_pixels:,} pixels (Limits.clip_pixels)"
            raise InputError(message, item=item)

    def check_walk(self, count: int, item: str) -> None:
        """Raise InputError where a clip holds more frames than allowed."""
        if count > self.frames:
            raise InputError(f"more than {self.frames:,} frames (Limits.frames); cut the clip, or raise the limit", item=item)
