"""What a clip is stored in and coded with, told from its first bytes alone: used to refuse what is no clip, and to name codecs."""

import re

__all__ = ["codec_of", "container_of"]

ATOMS = (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip", b"pnot")
STARTS = {
    b"\x1aE\xdf\xa3": "Matroska or WebM",
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "ASF",
    b"FLV\x01": "FLV",
    b"OggS": "Ogg",
    b"DKIF": "IVF",
    b"YUV4MPEG2 ": "Y4M",
    b"\x00\x00\x01\xba": "MPEG program stream",
    b"\x00\x00\x01\xb3": "MPEG video",
    b"\x00\x00\x01\xb0": "MPEG-4 video",
    b"\x00\x00\x00\x01": "H.264 or H.265 stream",
    b"\x00\x00\x01\x67": "H.264 stream",
    b"\x12\x00\x0a": "AV1 stream",
}


def container_of(head: bytes) -> str:
    """The kind of container, empty for content that is no clip. A playlist is none: it would have the decoder open other files."""
    if head[4:8] in ATOMS:
        return "MP4 or QuickTime"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "AVI"
    if head[:1] == b"G" and head[188:189] in (b"G", b""):
        return "MPEG transport stream"
    return next((name for start, name in STARTS.items() if head.startswith(start)), "")


def codec_of(content: bytes) -> str:
    """The name of the video codec as the container's header writes it, "unknown" where it is not found."""
    for pattern in (rb"stsd.{12}(\w{4})", rb"strh.{4}vids(\w{4})", rb"(V_[A-Z0-9/]{3,20})", rb"^DKIF.{4}(\w{4})"):
        found = re.search(pattern, content, re.DOTALL)
        if found:
            return found[1].decode("ascii")
    return "unknown"
