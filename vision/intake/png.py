"""The one grey or colour that a PNG declares transparent (its chunk tRNS), looked for in the bits that the file has.

PIL shows every pixel in bytes and hands the key over as it is written: it spreads 2 and 4 bits over a byte, and drops the lower half of 16.
"""

import io

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.PngImagePlugin

__all__ = ["keyed_out"]

# Of what PIL calls these, the bits of a value in the file. Of bilevel and 16-bit grey, and of palettes, it keeps all that is needed.
BITS = {"L;2": 2, "L;4": 4, "L": 8, "RGB": 8, "RGB;16B": 16}


def keyed_out(picture: PIL.Image.Image) -> npt.NDArray[np.bool_] | None:
    """Where the key stands, h w; the picture's pixels are then read. None where there is no key, or PIL compares it rightly by itself.

    Of 16 bits that were read before, as of the later frames of an animation, only the upper halves are there to be compared.
    """
    key = picture.info.get("transparency")
    fits = isinstance(key, tuple) and len(key) == 3 if picture.mode == "RGB" else isinstance(key, int)
    if not isinstance(picture, PIL.PngImagePlugin.PngImageFile) or not fits:
        return None
    bits = BITS.get(str(picture.tile[0].args), 0) if picture.tile else 0
    wanted = np.asarray(key)
    if bits == 0 and not (picture.mode == "RGB" and wanted.max() > 255):
        return None
    lower = _lower_halves(picture) if bits == 16 and picture.tell() == 0 else None
    values = np.asarray(picture)
    if lower is not None:
        values = values.astype(np.uint16) << 8 | lower
    elif bits in (0, 16):
        wanted = wanted >> 8
    else:
        # what is above the bits of the file does not count
        top = 2**bits - 1
        wanted = (wanted & top) * (255 // top)
    stands: npt.NDArray[np.bool_] = (values == wanted).reshape(*values.shape[:2], -1).all(-1)
    return stands


def _lower_halves(picture: PIL.PngImagePlugin.PngImageFile) -> npt.NDArray[np.uint8]:
    """The lower bytes of 16 bits: the same file once more, taken for one of the other order of bytes."""
    stream = picture.fp
    assert stream is not None, "pixels that are still to be read have a file"
    place = stream.tell()
    stream.seek(0)
    content = stream.read()
    stream.seek(place)
    with PIL.PngImagePlugin.PngImageFile(io.BytesIO(content)) as again:
        again.tile = [tile._replace(args="RGB;16L") for tile in again.tile]
        return np.asarray(again, np.uint8)
