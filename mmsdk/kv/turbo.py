"""TurboQuant's rounding (arXiv 2504.19874), the form for mean squared error: rotate, then round each channel by one fixed table.

    y = R x / |x|,   code_i = the nearest of the table's centroids to y_i,   x is about |x| R^T centroid[code]

A random rotation R spreads whatever is large over all d channels, after which each of them is nearly normal with variance 1/d whatever x
was, so that one table serves all: the centroids of Lloyd and Max for the normal distribution (Max 1960), whose errors are 0.363, 0.117,
0.0345 and 0.0095 of |x|^2 for one to four bits. Nothing is learned, no token's codes depend on another's, and besides the codes a token
has one number, its length.

[published] rotation, table and length. [ours] the rotation is the Q of a fixed random matrix; keys are rounded in this form too, without
the further bit for the residual that makes inner products unbiased.
"""

from functools import cache

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

__all__ = ["centroids", "restored", "rotated", "rotation", "rounded"]

# The positive halves of the tables for a variance of 1.
_HALVES = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}


def centroids(bits: int) -> Float[Tensor, " levels"]:
    """The 2^bits values that stand for normal numbers of variance 1, ascending; for one to four bits."""
    half = torch.tensor(_HALVES[bits], device="cpu")
    return torch.cat((-half.flip(0), half))


@cache
def rotation(width: int) -> Float[Tensor, "d d"]:
    """The same random rotation always, for so many channels."""
    drawn = torch.randn(width, width, generator=torch.Generator("cpu").manual_seed(width), dtype=torch.float64, device="cpu")
    turned: Tensor = torch.linalg.qr(drawn)[0]
    return turned.float()


def rotated(x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
    """R x of every vector."""
    return x.float() @ rotation(x.shape[-1]).to(x.device).T


def rounded(x: Float[Tensor, "*n d"], bits: int) -> tuple[UInt8[Tensor, "*n d"], Float[Tensor, "*n 1"]]:
    """The codes and the lengths of vectors."""
    wide, d = x.float(), x.shape[-1]
    lengths = wide.norm(dim=-1, keepdim=True)
    spread = rotated(wide / lengths.clamp_min(torch.finfo(torch.float32).tiny)) * d**0.5
    table = centroids(bits).to(x.device)
    return torch.bucketize(spread, (table[1:] + table[:-1]) / 2).to(torch.uint8), lengths


def restored(codes: UInt8[Tensor, "*n d"], lengths: Float[Tensor, "*n 1"], bits: int) -> Float[Tensor, "*n d"]:
    """The vectors that codes and lengths stand for."""
    d = codes.shape[-1]
    turned = centroids(bits).to(codes.device)[codes.long()] @ rotation(d).to(codes.device)
    found: Tensor = turned * (lengths.float() * d**-0.5)
    return found
