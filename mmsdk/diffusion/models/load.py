"""A video diffusion transformer from a folder in diffusers' layout, its own or that of a pipeline around it."""

from pathlib import Path

import torch

from mmsdk.diffusion.checkpoint import Family, read
from mmsdk.diffusion.dit import DiT
from mmsdk.diffusion.joint import JointDiT
from mmsdk.diffusion.models import cogvideox, hunyuan, ltx, small, wan
from mmsdk.diffusion.shared import SharedDiT
from mmsdk.errors import ModelError
from mmsdk.weights.fields import read_fields

__all__ = ["load"]

_FAMILIES: tuple[Family[DiT | JointDiT | SharedDiT], ...] = (
    wan.FAMILY,
    ltx.FAMILY,
    hunyuan.FAMILY,
    cogvideox.FAMILY,
    small.FAMILY,
)


def load(folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> DiT | JointDiT | SharedDiT:
    """The transformer of `folder`, or of its `transformer/` where it is a pipeline's. Raises as `mmsdk.diffusion.checkpoint.read` does.

    Families: Wan (2.1, 2.2), LTX-Video, HunyuanVideo, CogVideoX, all text to video, and our own, which `mmsdk.apps.train_video` trains.
    """
    folder = Path(folder)
    if (folder / "model_index.json").is_file():
        folder = folder / "transformer"
    fields = read_fields(folder / "config.json")
    found = fields.text("_class_name")
    for family in _FAMILIES:
        if found in family.classes:
            return read(folder, family, dtype, torch.device(device))
    known = ", ".join(name for family in _FAMILIES for name in family.classes)
    raise ModelError(f"{fields.where} is of a {found}; known are {known}")
