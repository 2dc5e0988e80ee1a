"""pi0: a flow-matching action expert beside PaliGemma (Black et al., arXiv 2410.24164; openpi's source) [published].

The suffix is [state ; a_0 ... a_h-1]: the state begins a block and so does a_0, so that the state sees the prefix and itself, and the
actions see everything. Each noisy action is joined with the time: e_i = W_out swish(W_in [W_a a_i ; temb]). The prefix (images, then the
instruction; bidirectional) is computed once, and the suffix anew in every Euler step on the prefix's frozen keys and values.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.stages import Context
from mmsdk.vla.heads.expert import Expert, ExpertConfig
from mmsdk.vla.heads.flow import Velocity, time_embedding
from mmsdk.vla.heads.prefix import Prefix

__all__ = ["Pi0", "Pi0Config", "block_starts"]


@dataclass(frozen=True, slots=True)
class Pi0Config:
    """Sizes; the defaults are openpi's. `chunk` is h, `action_dim` a, `state_dim` p, padding included."""

    expert: ExpertConfig = ExpertConfig()
    chunk: int = 50
    action_dim: int = 32
    state_dim: int = 32


class Pi0(nn.Module):
    """A `FlowNetwork`. Runs in the dtype of its parameters; times and the actions it is given and gives are float32."""

    def __init__(self, config: Pi0Config = Pi0Config()) -> None:
        super().__init__()
        width = config.expert.width
        self.config = config
        self.state_in = nn.Linear(config.state_dim, width)
        self.action_in = nn.Linear(config.action_dim, width)
        self.time_in = nn.Linear(2 * width, width)
        self.time_out = nn.Linear(width, width)
        self.expert = Expert(config.expert)
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
        """p, the numbers of a state, padding included."""
        return self.config.state_dim

    def velocity(self, context: Context, state: Float[Tensor, "b p"]) -> Velocity:
        """The velocity field of these rows. Raises ModelError where the context does not meet the expert in head space."""
        expert = self.config.expert
        prefix = Prefix.of(context.cache, expert.layers, expert.kv_heads, expert.head_dim)
        return partial(self, prefix, state)

    def forward(
        self, prefix: Prefix, state: Float[Tensor, "b p"], x: Float[Tensor, "b h a"], t: Float[Tensor, "b #h"]
    ) -> Float[Tensor, "b h a"]:
        """dx/dt of noisy actions x at time t."""
        dtype = self.action_in.weight.dtype
        time = time_embedding(t, self.config.expert.width).to(dtype)
        noisy = self.action_in(x.to(dtype))
        tokens = self.time_out(F.silu(self.time_in(torch.cat((noisy, time.expand_as(noisy)), dim=-1))))
        suffix = torch.cat((self.state_in(state.to(dtype))[:, None], tokens), dim=1)
        starts = block_starts(suffix.shape[1], 2, suffix.device)
        hidden = self.expert(suffix, time[:, :1], prefix, starts)[:, 1:]
        return F.linear(hidden.float(), self.action_out.weight.float(), self.action_out.bias.float())


def block_starts(tokens: int, blocks: int, device: torch.device) -> Bool[Tensor, " s"]:
    """A suffix whose first `blocks` tokens each begin a block, the last of which runs to the end."""
    return torch.arange(tokens, device=device) < blocks
