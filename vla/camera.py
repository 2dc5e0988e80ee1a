"""Frames as cameras give them, and pictures as policies want them: colour order, layout, turned or mirrored, size.

Each is declared, and applied once.
"""

from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.types import Image
from mmsdk.vla.contract import Camera

__all__ = ["shown", "upright"]


def upright(camera: Camera, frame: npt.NDArray[Any] | Tensor) -> Image:
    """A raw frame of this camera as an upright RGB picture; the frame is not changed nor shared.

    Raises InputError for what is not uint8 or not of the declared layout and size: three channels at the wrong end, another size, floats.
    """
    pixels = frame if isinstance(frame, Tensor) else torch.from_numpy(np.ascontiguousarray(frame))
    shape = (camera.height, camera.width, 3) if camera.layout == "hwc" else (3, camera.height, camera.width)
    if tuple(pixels.shape) != shape or pixels.dtype != torch.uint8:
        told = f"a frame of {tuple(pixels.shape)} {pixels.dtype}".replace("torch.", "")
        raise InputError(f"{told}, declared {shape} uint8 ({camera.layout})", item=f"camera {camera.name}")
    planes = pixels.permute(2, 0, 1) if camera.layout == "hwc" else pixels
    planes = planes.flip(0) if camera.colour == "bgr" else planes
    planes = planes.flip(-1) if camera.mirrored else planes
    # turned clockwise is set right by turning the other way, which is rot90's
    return Image(torch.rot90(planes, camera.turned // 90, (-2, -1)).clone(), camera.name)


def shown(camera: Camera, image: Image) -> Image:
    """An upright RGB picture as a policy's camera shows it: fitted into its size with black borders, turned, mirrored, in its colour order.

    The inverse of `upright` where the sizes are equal. What a policy gets is still three planes (3 h w): its layout concerns the wire.
    """
    planes = torch.rot90(_fitted(image.pixels, *camera.upright_size), -(camera.turned // 90), (-2, -1))
    planes = planes.flip(-1) if camera.mirrored else planes
    planes = planes.flip(0) if camera.colour == "bgr" else planes
    return Image(planes.contiguous(), camera.name, image.notes)


def _fitted(pixels: Tensor, height: int, width: int) -> Tensor:
    """As large as fits, in the middle of black."""
    tall, wide = pixels.shape[1:]
    if (tall, wide) == (height, width):
        return pixels
    scale = min(height / tall, width / wide)
    inner = max(1, round(tall * scale)), max(1, round(wide * scale))
    way = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    resized = cv2.resize(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()), (inner[1], inner[0]), interpolation=way)
    canvas = torch.zeros(3, height, width, dtype=torch.uint8)
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    canvas[:, top : top + inner[0], left : left + inner[1]] = torch.from_numpy(resized).permute(2, 0, 1)
    return canvas
