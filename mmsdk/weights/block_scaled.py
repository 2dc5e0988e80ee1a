"""Matrices in fp8 with a scale for every block of 128 x 128 numbers, as DeepSeek-V3 and V3.2 are published (arXiv 2412.19437, 3.3).

    weight[i, j] = fp8[i, j] * scale[i // 128, j // 128]          the scales are the tensor "..._scale_inv"

They are read to wider numbers, one matrix at a time. Tensors that are stored wide are read as they are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.weights.fields import Fields
from mmsdk.weights.safetensors import Checkpoint

__all__ = ["SCALES", "BlockScaled", "block_of"]

SCALES = "_scale_inv"


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """A checkpoint (`mmsdk.weights.names.Source`) some matrices of which are in blocks of so many rows and columns."""

    checkpoint: Checkpoint
    block: tuple[int, int]

    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first. Raises ModelError where there is no such tensor."""
        return self.checkpoint.shape(name)

    def where(self, name: str) -> str:
        """See `mmsdk.weights.names.Source`."""
        return self.checkpoint.where(name)

    def read(self, name: str, out: Tensor) -> None:
        """Write the tensor's values to `out`, which has its shape. Raises ModelError where the scales do not fit it, or are missing."""
        stored = self.checkpoint.raw(name)
        if stored.dtype != torch.float8_e4m3fn:
            self.checkpoint.read(name, out)
            return
        scales, (rows, columns) = self.checkpoint.tensor(name + SCALES), self.block
        wanted = tuple(-(-size // step) for size, step in zip(stored.shape, self.block, strict=True)) if stored.ndim == 2 else ()
        if scales.shape != wanted:
            where = f"{self.checkpoint.folder}: the tensor {name + SCALES!r}"
            raise ModelError(f"{where} is {tuple(scales.shape)}; for blocks of {rows} x {columns} it must be {wanted}")
        down = scales.float().repeat_interleave(rows, dim=0)[: len(stored)]
        out.copy_(stored.float() * down.repeat_interleave(columns, dim=1)[:, : stored.shape[1]])


def block_of(fields: Fields) -> tuple[int, int]:
    """Rows and columns of a block, by a checkpoint's `quantization_config`. Raises ModelError for quantisation of another kind."""
    group = fields.group("quantization_config")
    if group.text("quant_method", "") != "fp8" or group.text("fmt", "e4m3") != "e4m3":
        raise ModelError(f"{fields.where}: quantised checkpoints (quantization_config) are not supported, but for fp8 (e4m3) in blocks")
    block = group.wholes("weight_block_size")
    if len(block) != 2 or min(block) < 1:
        raise group.wrong("weight_block_size", "two whole numbers above 0")
    return block[0], block[1]
