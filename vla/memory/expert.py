"""The action expert of D2-VLA: pi0.5's, with the state as one continuous token before the actions (arXiv 2609.34792) [published].

The suffix is [state ; a_0 ... a_h-1]: the state sees all blocks and itself, the actions see blocks, state and one another. As in pi0.5
time modulates every norm. In a chunk whose actions stand at different times the state takes the last one's, which is the flow's own
[reconstruction].
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.stages import Context
from mmsdk.vla.heads.expert import Expert, ExpertConfig, Watch, unwatched
from mmsdk.vla.heads.flow import Velocity, time_embedding
from mmsdk.vla.heads.pi0 import block_starts
from mmsdk.vla.heads.prefix import Prefix

__all__ = ["DualConfig", "DualExpert", "Watched"]


@dataclass(frozen=True, slots=True)
class DualConfig:
    """Sizes; the defaults are the paper's. The expert's norms are adaptive whatever its config says."""

    expert: ExpertConfig = ExpertConfig(adaptive=True)
    chunk: int = 25
    action_dim: int = 32
    state_dim: int = 32


class DualExpert(nn.Module):
    """A `FlowNetwork`. Runs in the dtype of its parameters; times and the actions it is given and gives are float32."""

    def __init__(self, config: DualConfig = DualConfig()) -> None:
        super().__init__()
        width = config.expert.width
        self.config = replace(config, expert=replace(config.expert, adaptive=True))
        self.state_in = nn.Linear(config.state_dim, width)
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
        """p, the numbers of a state, padding included."""
        return self.config.state_dim

    def velocity(self, context: Context, state: Float[Tensor, "b p"]) -> Velocity:
        """The velocity field of these rows. Raises ModelError where the context does not meet the expert in head space."""
        return self.watched(context, state, unwatched)

    def watched(self, context: Context, state: Float[Tensor, "b p"], watch: Watch) -> Velocity:
        """The same, while `watch` looks on at every layer of every step."""
        expert = self.config.expert
        prefix = Prefix.of(context.cache, expert.layers, expert.kv_heads, expert.head_dim)
        return partial(self, prefix, state, watch=watch)

    def forward(
        self, prefix: Prefix, state: Float[Tensor, "b p"], x: Float[Tensor, "b h a"], t: Float[Tensor, "b #h"], watch: Watch = unwatched
    ) -> Float[Tensor, "b h a"]:
        """dx/dt of noisy actions x at time t."""
        dtype = self.action_in.weight.dtype
        time = time_embedding(t, self.config.expert.width).to(dtype)
        condition = F.silu(self.time_out(F.silu(self.time_in(time))))
        if t.shape[1] > 1:
            condition = torch.cat((condition[:, -1:], condition), dim=1)
        suffix = torch.cat((self.state_in(state.to(dtype))[:, None], self.action_in(x.to(dtype))), dim=1)
        starts = block_starts(suffix.shape[1], 2, suffix.device)
        hidden = self.expert(suffix, condition, prefix, starts, watch)[:, 1:]
        return F.linear(hidden.float(), self.action_out.weight.float(), self.action_out.bias.float())


@dataclass(frozen=True, slots=True)
class Watched:
    """A `FlowNetwork` that is looked at while it works, for heads that know nothing of memories."""

    network: DualExpert
    watch: Watch

    @property
    def chunk(self) -> int:
        """See `FlowNetwork`."""
        return self.network.chunk

    @property
    def action_dim(self) -> int:
        """See `FlowNetwork`."""
        return self.network.action_dim

    @property
    def state_dim(self) -> int:
        """See `FlowNetwork`."""
        return self.network.state_dim

    def velocity(self, context: Context, state: Float[Tensor, "b p"]) -> Velocity:
        """See `FlowNetwork`."""
        return self.network.watched(context, state, self.watch)
