"""The orientation that a camera noted beside the pixels (EXIF tag 0x0112), read by hand: a damaged note counts as upright."""

import struct

import numpy as np
import numpy.typing as npt

__all__ = ["orientation", "upright"]

TAG = 0x0112
SHORT = 3


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
