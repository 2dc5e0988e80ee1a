"""What a file is, told by its first bytes alone: names and extensions lie.

Only the formats listed here are ever handed to a decoder. Playlists and manifests (which would make a decoder open other files or
addresses), PostScript and other programs in disguise are not among them.
"""

from dataclasses import dataclass

from mmsdk.errors import InputError

__all__ = ["HEAD", "Kind", "kind_of"]

HEAD = 192
"""First bytes that `kind_of` needs."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A format: its name, and the name of FFmpeg's demuxer where it is a clip."""

    name: str
    demuxer: str = ""

    @property
    def clip(self) -> bool:
        """Whether this is a clip's container rather than a picture."""
        return bool(self.demuxer)


_MAGIC = (
    (b"\xff\xd8\xff", Kind("JPEG")),
    (b"\x89PNG\r\n\x1a\n", Kind("PNG")),
    (b"GIF87a", Kind("GIF")),
    (b"GIF89a", Kind("GIF")),
    (b"BM", Kind("BMP")),
    (b"II*\0", Kind("TIFF")),
    (b"MM\0*", Kind("TIFF")),
    (b"\x1aE\xdf\xa3", Kind("Matroska", "matroska")),
    (b"OggS", Kind("Ogg", "ogg")),
    (b"FLV\x01", Kind("FLV", "flv")),
    (b"0&\xb2u\x8ef\xcf\x11\xa6\xd9\0\xaa\0b\xcel", Kind("ASF", "asf")),
    (b"\0\0\x01\xba", Kind("MPEG-PS", "mpeg")),
    (b"\0\0\x01\xb3", Kind("MPEG", "mpegvideo")),
    (b"\0\0\0\x01\x67", Kind("H.264", "h264")),
    (b"\0\0\0\x01\x09", Kind("H.264", "h264")),
    (b"\0\0\0\x01\x40", Kind("H.265", "hevc")),
    (b"DKIF", Kind("IVF", "ivf")),
    (b"YUV4MPEG2 ", Kind("YUV4MPEG2", "yuv4mpegpipe")),
)
_RIFF = {b"WEBP": Kind("WebP"), b"AVI ": Kind("AVI", "avi")}
_MP4 = Kind("MP4", "mov")
_BOXES = {b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"}
_STILL_BRANDS = {b"avif": Kind("AVIF"), b"avis": Kind("AVIF")}
_HEIF = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}
_KNOWN_ELSEWHERE = (
    (b"%PDF", "a PDF document: render its pages to pictures first"),
    (b"%!PS", "PostScript: render it to PNG first"),
    (b"#EXTM3U", "a playlist, not a clip: pass the clip itself"),
    (b"ffconcat", "a list of clips, not a clip: pass the clip itself"),
    (b"<", "markup (SVG, HTML or a manifest), not pixels: render it to PNG first"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000, which is not read: convert it to JPEG or PNG first"),
    (b"8BPS", "a Photoshop document: export it as PNG first"),
)
_TS_PACKET, _SYNC = 188, b"G"


def kind_of(head: bytes, item: str) -> Kind:
    """The format of what begins with `head` (at least HEAD bytes, or all there are); InputError where it is none that is read."""
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    if head[:4] == b"RIFF" and head[8:12] in _RIFF:
        return _RIFF[head[8:12]]
    if head[4:8] in _BOXES:
        return _boxed(head, item)
    if head[:1] == b"P" and head[1:2] in b"123456" and head[2:3].isspace():
        return Kind("PPM")
    if head[:1] == _SYNC and head[_TS_PACKET : _TS_PACKET + 1] == _SYNC:
        return Kind("MPEG-TS", "mpegts")
    raise InputError(_unknown(head), item=item)


def _boxed(head: bytes, item: str) -> Kind:
    brand = head[8:12] if head[4:8] == b"ftyp" else b""
    if brand in _HEIF and not any(head[at : at + 4] in _STILL_BRANDS for at in range(16, 64, 4)):
        raise InputError("a HEIC picture, which is not read: convert it to JPEG or PNG first", item=item)
    return Kind("AVIF") if brand in _STILL_BRANDS or brand in _HEIF else _MP4


def _unknown(head: bytes) -> str:
    if not head:
        return "there are no bytes: the file is empty"
    for magic, what in _KNOWN_ELSEWHERE:
        if head.lstrip().startswith(magic):
            return what
    return f"not a picture or a clip in a format that is read: begins with {bytes(head[:12])!r}"
