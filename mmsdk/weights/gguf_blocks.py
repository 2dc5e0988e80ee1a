"""Values from the blocks that GGUF files store weights in.

The common 32-value blocks are unpacked here, a whole tensor at a time, because a model's start waits for them; all others by the gguf
package, which goes sixteen rows at a time.
"""

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from jaxtyping import Float, UInt8
from torch import Tensor

from mmsdk.quant.int4 import Int4

__all__ = ["as_int4", "unpack"]

_PIECE = 1 << 17


def unpack(data: UInt8[Tensor, "r c"], kind: Kind, out: Float[Tensor, "r v"]) -> None:
    """Write rows of values, from rows of bytes, to `out` in its dtype.

    Raises NotImplementedError for a kind that the gguf package does not read.
    """
    # Piece by piece, so that what lies between stays in the processor's cache.
    rows = max(1, _PIECE // out.shape[1])
    for piece, place in zip(data.split(rows), out.split(rows), strict=True):
        if kind in _FLOATS:
            place.copy_(piece.view(_FLOATS[kind]))
        elif kind in _BLOCKS:
            size, values = _BLOCKS[kind]
            place.copy_(values(piece.view(-1, size)).view(place.shape))
        else:
            place.copy_(torch.from_numpy(gguf.quants.dequantize(piece.numpy(), kind)))


def as_int4(data: UInt8[Tensor, "r c"], kind: Kind) -> Int4 | None:
    """Rows of blocks as int4, code by code, where that is what they are (Q4_0, Q4_1); the scales alone become numbers on the way."""
    if kind not in (Kind.Q4_0, Kind.Q4_1):
        return None
    blocks = data.reshape(-1, _BLOCKS[kind][0])
    scale = _scale(blocks, 0)
    # Q4_0 counts from -8 with no offset; Q4_1 counts from 0, upwards from a minimum, and 8 steps up is where ours has its zero.
    zero = torch.zeros_like(scale) if kind == Kind.Q4_0 else _scale(blocks, 2) + 8 * scale
    codes = _nibbles(blocks[:, -16:]).view(len(data), -1)
    return Int4(codes, scale.view(len(data), -1), zero.view(len(data), -1), codes.shape[1])


def _scale(blocks: UInt8[Tensor, "k c"], at: int) -> Float[Tensor, "k 1"]:
    return blocks[:, at : at + 2].view(torch.float16).float()


def _nibbles(packed: UInt8[Tensor, "k 16"]) -> UInt8[Tensor, "k 32"]:
    """The low halves of 16 bytes are values 0 to 15, the high halves 16 to 31."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _q4_0(blocks: UInt8[Tensor, "k 18"]) -> Float[Tensor, "k 32"]:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _scale(blocks, 0)


def _q4_1(blocks: UInt8[Tensor, "k 20"]) -> Float[Tensor, "k 32"]:
    return _nibbles(blocks[:, 4:]).float() * _scale(blocks, 0) + _scale(blocks, 2)


def _q8_0(blocks: UInt8[Tensor, "k 34"]) -> Float[Tensor, "k 32"]:
    return blocks[:, 2:].view(torch.int8).float() * _scale(blocks, 0)


_FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_BLOCKS = {Kind.Q4_0: (18, _q4_0), Kind.Q4_1: (20, _q4_1), Kind.Q8_0: (34, _q8_0)}
