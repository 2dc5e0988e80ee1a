"""Pages of keys and values on disk: one file each, with a checksum, in place as a whole or not at all. No pickle."""

import hashlib
import os
from pathlib import Path

import safetensors.torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.values import cause

__all__ = ["Pair", "read_page", "write_page"]

Pair = tuple[Float[Tensor, "b h p d"], Float[Tensor, "b h p d"]]


def write_page(path: Path, pair: Pair) -> None:
    """Keys and values, written beside the file and moved to it once the disk has them. Raises OSError as the disk does."""
    body = safetensors.torch.save({"keys": pair[0].contiguous().cpu(), "values": pair[1].contiguous().cpu()})
    beside = path.with_suffix(".part")
    with beside.open("wb") as file:
        file.write(hashlib.sha256(body).digest() + body)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def read_page(path: Path) -> Pair:
    """The page, to the bit. Raises InputError where the file is missing, cut short or changed."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"the page cannot be read: {cause(error)}", item=str(path)) from error
    digest, body = content[:32], content[32:]
    if hashlib.sha256(body).digest() != digest:
        raise InputError("the page is damaged: its checksum is another", item=str(path))
    tensors = safetensors.torch.load(body)
    return tensors["keys"], tensors["values"]
