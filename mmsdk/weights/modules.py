"""A module of ours on the tensors of a checkpoint: each of them read straight to its place, in the dtype asked for."""

from typing import TypeVar

import torch
from torch import nn

from mmsdk.errors import ModelError
from mmsdk.weights.safetensors import Checkpoint

__all__ = ["filled"]

Module = TypeVar("Module", bound=nn.Module)


def filled(module: Module, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, part: str) -> Module:
    """`module`, which may lie on the meta device, with the tensors that the checkpoint has by its names; ready to run, not to train.

    `part` is what messages call it. Raises ModelError, naming them, for tensors that are missing, left over or of another shape.
    """
    wanted = module.state_dict()
    checkpoint.fit(wanted.keys(), part)
    state = {}
    for name, like in wanted.items():
        if checkpoint.shape(name) != tuple(like.shape):
            told = f"{checkpoint.told(name)!r} is {checkpoint.shape(name)}, {part} needs {tuple(like.shape)}"
            raise ModelError(f"{checkpoint.folder}: the tensor {told}")
        state[name] = torch.empty(like.shape, dtype=dtype, device=device)
        checkpoint.read(name, state[name])
    module.load_state_dict(state, assign=True)
    return module.requires_grad_(False).eval()
