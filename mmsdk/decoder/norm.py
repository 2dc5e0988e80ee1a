"""Root mean square layer normalisation, computed in float32 whatever the dtype around it."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.decoder.launch import launches
from mmsdk.kernels.cpu import rows
from mmsdk.kernels.ops.rms_norm import WIDEST, add_rms_norm, rms_norm

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight) over the last axis (Zhang and Sennrich, arXiv 1910.07467); an `offset` of 1 is Gemma's."""

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """The squares of a float16 activation overflow from 256 on, so they are taken in float32."""
        if not self.offset and rows.here(x) and self.weight.dtype == x.dtype:
            return rows.normalised(x, self.weight, self.eps)
        if launches(x, self.weight) and len(self.weight) <= WIDEST:
            return rms_norm(x, self.weight, self.eps, self.offset)
        if self.offset:
            wide = x.float()
            # Gemma applies the weight before it rounds.
            scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * (self.offset + self.weight.float())
            return scaled.to(x.dtype)
        # Rounded before the weight is applied, as checkpoints of this family were trained; a weight may be wider than the stream.
        return (self.weight * self._normed(x)).to(x.dtype)

    def behind(self, x: Float[Tensor, "*n d"], added: Float[Tensor, "*n d"]) -> tuple[Float[Tensor, "*n d"], Float[Tensor, "*n d"]]:
        """x with something added, and that normalised: in one pass where Triton runs."""
        if launches(x, added, self.weight) and x.dtype == added.dtype and len(self.weight) <= WIDEST:
            normed, total = add_rms_norm(added, x, self.weight, self.eps, self.offset)
            return total, normed
        total = x + added
        return total, self(total)

    def _normed(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        if x.requires_grad or x.device.type != "cpu":
            wide = x.float()
            return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        # (x, -x) has the mean 0 and the variance mean(x^2), and torch has a fused kernel of LayerNorm for the processor.
        d = x.shape[-1]
        return F.layer_norm(torch.cat((x, -x), -1), (2 * d,), eps=self.eps).narrow(-1, 0, d)
