"""Where a model is: the device that a name means, and the one that its weights are on."""

import torch

from mmsdk.errors import InputError
from mmsdk.models.types import VLM
from mmsdk.vision.values import shown

__all__ = ["device_of", "find_device"]


def find_device(device: str | torch.device | None) -> torch.device:
    """A device by its name; None is the processor. Raises InputError, saying what there is, for one that torch does not see here."""
    here = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    there = [name for name, count in here.items() if count] + [f"cuda:{number}" for number in range(here["cuda"])]
    told = f'this machine has {", ".join(there)}; a device is written as "cpu", "cuda", "cuda:1" or "mps"'
    try:
        # a number alone is read as one of whatever accelerator there is, or told in torch's words
        place = torch.device(device) if isinstance(device, str | torch.device) else torch.device("cpu") if device is None else None
    except RuntimeError:
        place = None
    if place is None:
        raise InputError(f"{shown(device)} is no device; {told}", item="device")
    if (place.index or 0) >= here.get(place.type, 0):
        raise InputError(f"torch sees no {str(place)!r} here; {told}", item="device")
    return place


def device_of(vlm: VLM) -> torch.device:
    """Where the decoder's weights are, and with them everything else."""
    return next(vlm.decoder.parameters()).device
