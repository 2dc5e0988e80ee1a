"""The orientation that a camera noted beside the pixels (EXIF tag 0x0112), read by hand: a damaged note counts as upright."""

import struct

import numpy as np
import numpy.typing as npt

__all__ = ["apart", "orientation", "upright"]

TAG = 0x0112
SHORT = 3


def apart(jpeg: bytes) -> tuple[bytes, bytes]:
    """A JPEG without its EXIF blocks, and the first of them: PIL would parse it while opening, and warn of damage."""
    exif, kept, at = b"", [jpeg[:2]], 2
    while jpeg[at : at + 1] == b"\xff" and (marker := jpeg[at + 1 : at + 2]) not in (b"\xda", b"\xd9", b"\xff", b""):
        end = at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if marker == b"\xe1" and jpeg[at + 4 : at + 10] == b"Exif\0\0":
            exif = exif or jpeg[at + 4 : end]
        else:
            kept.append(jpeg[at:end])
        at = end
    return (b"".join([*kept, jpeg[at:]]), exif) if exif else (jpeg, exif)


def orientation(exif: bytes) -> int:
    """The orientation 1 to 8 in an EXIF block (CIPA DC-008, 4.6.4); 1 where there is none or the block is damaged."""
    tiff = exif.removeprefix(b"Exif\x00\x00")
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return 1
    start = struct.unpack_from(f"{order}I", tiff, 4)[0]
    if start + 2 > len(tiff):
        return 1
    count = struct.unpack_from(f"{order}H", tiff, start)[0]
    for entry in range(start + 2, min(start + 2 + 12 * count, len(tiff) - 11), 12):
        tag, kind, _, value = struct.unpack_from(f"{order}HHIH", tiff, entry)
        if tag == TAG:
            return value if kind == SHORT and 1 <= value <= 8 else 1
    return 1


def upright(pixels: npt.NDArray[np.uint8], turned: int) -> npt.NDArray[np.uint8]:
    """h w c as it should be displayed, given its orientation; a view."""
    if turned >= 5:
        pixels = pixels.swapaxes(0, 1)
    # after the swap, 6 is mirrored left to right, 8 top to bottom, 7 both, 5 neither
    across, down = {1: (0, 0), 2: (1, 0), 3: (1, 1), 4: (0, 1), 5: (0, 0), 6: (1, 0), 7: (1, 1), 8: (0, 1)}[turned]
    return pixels[:: -1 if down else 1, :: -1 if across else 1]
