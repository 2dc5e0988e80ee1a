"""The feed-forward half of a layer."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["SwiGLU"]


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202); gate and up are one matrix [2 * inner, d], gate first."""

    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """Width d in, width d out."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        down: Tensor = self.down(F.silu(gate) * up)
        return down
