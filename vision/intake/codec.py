"""What a clip is coded with, as its container's header writes it: to name the codec where there is no decoder for it."""

import os
import re

from mmsdk.vision.intake.source import Stream

__all__ = ["codec_of", "unreadable"]

SEARCHED = 2**20
PATTERNS = (
    rb"stsd.{12}([\w.]{4})",
    rb"strh.{4}vids(\w{4})",
    rb"(V_[A-Z0-9/]{3,20})",
    rb"^DKIF.{4}(\w{4})",
    # the head of a bitmap (Windows' BITMAPINFOHEADER), which ASF keeps
    rb"\x28\0\0\0.{8}\x01\0[\x01-\x20]\0(\w{4})",
)


def codec_of(stream: Stream) -> str:
    """The name of a clip's video codec, "unknown" where it is not found in the first or last megabyte."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    head = stream.read(SEARCHED)
    # a camera writes the header of an MP4 behind the frames
    stream.seek(max(0, size - SEARCHED))
    tail = stream.read(SEARCHED)
    for pattern in PATTERNS:
        found = re.search(pattern, head, re.DOTALL) or re.search(pattern, tail, re.DOTALL)
        if found:
            return found[1].decode("ascii")
    return "unknown"


def unreadable(kind: str, stream: Stream) -> str:
    """What is wrong with a clip in a container of this kind that opens not at all or without a decoder."""
    codec = codec_of(stream)
    if codec == "unknown":
        return f"the clip ({kind}) is truncated or corrupt, or has no moving pictures in it"
    return f"the clip ({kind}) is truncated or corrupt, or there is no decoder for its codec, {codec}"
