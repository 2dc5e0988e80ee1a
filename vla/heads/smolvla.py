"""SmolVLA: an expert that meets the decoder in even layers and reads it in odd ones (arXiv 2506.01844; lerobot's source) [published].

Even layers are joint attention as in pi0. In odd layers the expert's queries attend to the decoder's cached keys and values alone, which
the expert's own projections map first (the keys rotated, as they were cached); there its positions begin at 0. The state is one token at
the end of the prefix, which neither images nor words see, so it is prefilled onto a branch. Every action token begins a block: unlike
pi0's, actions are causal. Images and words enter the decoder times the root of its width, and all rotations have base 10,000, whatever
the decoder was trained with.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.attention.mask import Bias
from mmsdk.decoder.mlp import GatedMLP
from mmsdk.decoder.norm import RMSNorm
from mmsdk.decoder.rope import Rope, Rotation, Unscaled
from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.types import LayerView
from mmsdk.stages import Context
from mmsdk.vla.heads.branch import Branch
from mmsdk.vla.heads.expert import ExpertConfig, SuffixAttention, SuffixRotations
from mmsdk.vla.heads.flow import Velocity, time_embedding
from mmsdk.vla.heads.prefix import Prefix
from mmsdk.vla.heads.visibility import SuffixMasks

__all__ = ["SmolVLA", "SmolVLAConfig"]


@dataclass(frozen=True, slots=True)
class SmolVLAConfig:
    """Sizes; the defaults are lerobot's (0.75 of SmolVLM2-500M's width, 16 layers, joint attention every second layer)."""

    expert: ExpertConfig = ExpertConfig(720, 16, 15, 5, 64, 2048, 1e-5, activation="silu")
    decoder_width: int = 960
    joint_every: int = 2
    chunk: int = 50
    action_dim: int = 32
    state_dim: int = 32


class CrossAttention(nn.Module):
    """The suffix's queries over keys and values made from the decoder's cached ones."""

    def __init__(self, config: ExpertConfig) -> None:
        super().__init__()
        size = config.kv_heads * config.head_dim
        self.heads, self.head_dim = config.heads, config.head_dim
        self.q = nn.Linear(config.width, config.heads * config.head_dim, bias=False)
        self.k = nn.Linear(size, size, bias=False)
        self.v = nn.Linear(size, size, bias=False)
        self.o = nn.Linear(config.heads * config.head_dim, config.width, bias=False)

    def forward(self, x: Float[Tensor, "b s d"], view: LayerView, rotation: Rotation) -> Float[Tensor, "b s d"]:
        """Attend from the suffix to all of the prefix that is valid."""
        b, s, _ = x.shape
        query = rotation(self.q(x).view(b, s, self.heads, self.head_dim).transpose(1, 2))
        keys, values = self._mapped(self.k, view.keys), self._mapped(self.v, view.values)
        mask = Bias.of(view.valid[:, None, None, :].expand(-1, -1, s, -1), x.dtype)
        seen = F.scaled_dot_product_attention(query, keys, values, mask.bias, enable_gqa=self.heads != keys.shape[1])
        out: Tensor = self.o(seen.transpose(1, 2).reshape(b, s, -1))
        return out

    def _mapped(self, projection: nn.Module, cached: Float[Tensor, "b g t d"]) -> Float[Tensor, "b g t d"]:
        b, _, t, d = cached.shape
        side_by_side = cached.transpose(1, 2).reshape(b, t, -1).to(self.k.weight.dtype)
        mapped: Tensor = projection(side_by_side).view(b, t, -1, d).transpose(1, 2)
        return mapped


class SmolVLALayer(nn.Module):
    """Joint or cross attention, then feed-forward, each on the normed stream and added to it."""

    def __init__(self, config: ExpertConfig, joint: bool) -> None:
        super().__init__()
        self.joint = joint
        self.norm1 = RMSNorm(config.width, config.norm_eps)
        self.attention = SuffixAttention(config) if joint else CrossAttention(config)
        self.norm2 = RMSNorm(config.width, config.norm_eps)
        self.mlp = GatedMLP(config.width, config.inner, False, config.activation)

    def forward(
        self, x: Float[Tensor, "b s d"], view: LayerView, behind: Rotation, restarted: Rotation, masks: SuffixMasks
    ) -> Float[Tensor, "b s d"]:
        """One layer; `behind` rotates to the positions after the prefix, `restarted` to positions from 0."""
        read = self.norm1(x)
        update = self.attention(read, view, behind, masks.of(view)) if self.joint else self.attention(read, view, restarted)
        x = x + update
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class SmolVLA(nn.Module):
    """A `FlowNetwork`. It needs the decoder itself, for the state's token; the decoder is used as it is and is not a part of the module."""

    def __init__(self, decoder: Decoder, config: SmolVLAConfig = SmolVLAConfig()) -> None:
        super().__init__()
        expert = config.expert
        self.config = config
        self.state_in = nn.Linear(config.state_dim, config.decoder_width)
        self.action_in = nn.Linear(config.action_dim, expert.width)
        self.time_in = nn.Linear(2 * expert.width, expert.width)
        self.time_out = nn.Linear(expert.width, expert.width)
        self.layers = nn.ModuleList(SmolVLALayer(expert, layer % config.joint_every == 0) for layer in range(expert.layers))
        self.norm = RMSNorm(expert.width, expert.norm_eps)
        self.action_out = nn.Linear(expert.width, config.action_dim)
        self._rope = Rope(expert.head_dim, expert.rope_theta, Unscaled())
        # In a tuple, so that its weights are neither saved nor trained as this network's.
        self._decoder = (decoder,)

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
        """The velocity field of these rows; the state's token goes onto a branch of the cache, where actions find it."""
        return partial(self, self.prefix(context, state))

    def prefix(self, context: Context, state: Float[Tensor, "b p"]) -> Prefix:
        """The context with the state's token behind it. Raises ModelError where it does not meet the expert in head space."""
        (decoder,), expert, branch = self._decoder, self.config.expert, Branch(context.cache.fork(), self.config.expert.layers)
        token = self.state_in(state.to(self.state_in.weight.dtype))[:, None].to(context.hidden.dtype)
        decoder(token, branch.position[:, None], branch)
        return Prefix.of(branch, expert.layers, expert.kv_heads, expert.head_dim)

    def forward(self, prefix: Prefix, x: Float[Tensor, "b h a"], t: Float[Tensor, "b #h"]) -> Float[Tensor, "b h a"]:
        """dx/dt of noisy actions x at time t."""
        dtype = self.action_in.weight.dtype
        noisy = self.action_in(x.to(dtype))
        time = time_embedding(t, noisy.shape[-1]).to(dtype).expand_as(noisy)
        tokens = self.time_out(F.silu(self.time_in(torch.cat((noisy, time), dim=-1))))
        count = torch.arange(tokens.shape[1], device=tokens.device)
        restarted = self._rope(count[None], dtype)
        behind, masks = SuffixRotations(self._rope, len(count), dtype), SuffixMasks(torch.ones_like(count, dtype=torch.bool), dtype)
        for layer, view, place in zip(self.layers, prefix.views, prefix.places, strict=True):
            tokens = layer(tokens, view, behind.of(place), restarted, masks)
        hidden = self.norm(tokens).float()
        return F.linear(hidden, self.action_out.weight.float(), self.action_out.bias.float())
