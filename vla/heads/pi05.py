"""pi0.5: the time modulates every norm of the expert, and the state is part of the prompt (arXiv 2504.16054; openpi's source) [published].

The suffix is [a_0 ... a_h-1], one block. c = swish(W_2 swish(W_1 temb)) sets scale, shift and residual gate of every norm; the state is
spelt in 256 bins by `state.pi05_prompt`. Times may differ within a chunk, so that actions which are already certain stand at t = 0
(training-time real-time chunking, arXiv 2512.05964).
"""

from dataclasses import dataclass, replace
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.stages import Context
from mmsdk.vla.heads.expert import Expert, ExpertConfig
from mmsdk.vla.heads.flow import Velocity, time_embedding
from mmsdk.vla.heads.pi0 import block_starts
from mmsdk.vla.heads.prefix import Prefix

__all__ = ["Pi05", "Pi05Config"]


@dataclass(frozen=True, slots=True)
class Pi05Config:
    """Sizes; the defaults are openpi's. The expert's norms are adaptive whatever its config says."""

    expert: ExpertConfig = ExpertConfig(adaptive=True)
    chunk: int = 50
    action_dim: int = 32


class Pi05(nn.Module):
    """A `FlowNetwork`. Runs in the dtype of its parameters; times and the actions it is given and gives are float32."""

    def __init__(self, config: Pi05Config = Pi05Config()) -> None:
        super().__init__()
        width = config.expert.width
        self.config = replace(config, expert=replace(config.expert, adaptive=True))
        self.action_in = nn.Linear(config.action_dim, width)
        self.time_in = nn.Linear(width, width)
        self.time_out = nn.Linear(width, width)
        self.expert = Expert(self.config.expert)
        self.action_out = nn.Linear(width, config.action_dim)

    @property
    def chunk(self) -> int:
        """h, the actions predicted at once."""
        return self.config.chunk

    @property
    def action_dim(self) -> int:
        """a, the numbers of an action, padding included."""
        return self.config.action_dim

    @property
    def state_dim(self) -> int:
        """0: the state is part of the prompt."""
        return 0

    def velocity(self, context: Context, state: Float[Tensor, "b p"]) -> Velocity:
        """The velocity field of these rows; the state is not looked at, the prompt has told it."""
        expert = self.config.expert
        prefix = Prefix.of(context.cache, expert.layers, expert.kv_heads, expert.head_dim)
        return partial(self, prefix)

    def forward(self, prefix: Prefix, x: Float[Tensor, "b h a"], t: Float[Tensor, "b #h"]) -> Float[Tensor, "b h a"]:
        """dx/dt of noisy actions x at time t."""
        dtype = self.action_in.weight.dtype
        time = time_embedding(t, self.config.expert.width).to(dtype)
        condition = F.silu(self.time_out(F.silu(self.time_in(time))))
        suffix = self.action_in(x.to(dtype))
        hidden = self.expert(suffix, condition, prefix, block_starts(suffix.shape[1], 1, suffix.device))
        return F.linear(hidden.float(), self.action_out.weight.float(), self.action_out.bias.float())
