"""The feed-forward half of a layer."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.decoder.launch import launches
from mmsdk.decoder.linear import Linear
from mmsdk.kernels.cpu import rows
from mmsdk.kernels.ops.swiglu import swiglu

__all__ = ["Activation", "GatedMLP"]

Activation = Literal["silu", "gelu_tanh"]

_FUNCTIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202): SwiGLU with "silu", GeGLU with "gelu_tanh".

    Gate and up are one matrix [2 * inner, d], gate first.
    """

    def __init__(self, width: int, inner: int, bias: bool, activation: Activation = "silu") -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * inner, bias=bias)
        self.down = Linear(inner, width, bias=bias)
        self.kind: Activation = activation
        self.activation = _FUNCTIONS[activation]

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """Width d in, width d out."""
        both = self.gate_up(x)
        if rows.here(both):
            inner = rows.gated(both, self.kind == "gelu_tanh")
        elif self.kind == "silu" and launches(both):
            inner = swiglu(both)
        else:
            gate, up = both.chunk(2, dim=-1)
            inner = self.activation(gate) * up
        down: Tensor = self.down(inner)
        return down
