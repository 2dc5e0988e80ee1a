"""All actions in one pass: parallel decoding with L1 regression (OpenVLA-OFT, arXiv 2502.19645; its source) [published].

Behind the prompt stand h * a empty placeholders (zero embeddings) and the end-of-text token; everything sees everything. As in next-token
prediction, the hidden state before each placeholder predicts it; the a states of one action together go through an MLP with residuals.
Proprioception and FiLM are optional upstream; a proprioceptive token belongs to the prompt, after the visual tokens.

Published is one pass over prompt and placeholders, `predict`. As an `ActionHead` the prompt has been computed before, so that it does not
see the placeholders [reconstruction]: the same network, but weights trained the published way will not give the published numbers.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.none import NoCache
from mmsdk.kv.slots import positions_of
from mmsdk.stages import Context
from mmsdk.vla.types import ActionChunk, Observation

__all__ = ["ParallelConfig", "ParallelHead", "ResidualMLP"]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Sizes: h actions of a numbers (8 of 7 on LIBERO, 25 of 14 on ALOHA, 5 of 7 on Bridge), `hidden` of the MLP, the end-of-text id."""

    width: int = 4096
    hidden: int = 4096
    horizon: int = 8
    dims: int = 7
    stop: int = 2
    blocks: int = 2


class ResidualMLP(nn.Module):
    """LN, linear, ReLU, then blocks of x + ReLU(linear(LN(x))), then LN and a linear map to the a numbers of an action."""

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__()
        width = config.width * config.dims
        self.norm_in, self.into = nn.LayerNorm(width), nn.Linear(width, config.hidden)
        blocks = (
            nn.Sequential(nn.LayerNorm(config.hidden), nn.Linear(config.hidden, config.hidden), nn.ReLU()) for _ in range(config.blocks)
        )
        self.blocks = nn.ModuleList(blocks)
        self.norm_out, self.out = nn.LayerNorm(config.hidden), nn.Linear(config.hidden, config.dims)

    def forward(self, x: Float[Tensor, "b h e"]) -> Float[Tensor, "b h a"]:
        """The hidden states of an action's numbers, side by side, to the action."""
        x = F.relu(self.into(self.norm_in(x)))
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.out(self.norm_out(x))
        return out


@dataclass(frozen=True, slots=True)
class ParallelHead:
    """An `ActionHead` on a decoder and the MLP."""

    decoder: Decoder
    mlp: ResidualMLP
    config: ParallelConfig

    def __call__(self, context: Context, observation: Observation) -> ActionChunk:
        """A chunk for one row, the prompt not seeing the placeholders [reconstruction]."""
        with torch.no_grad():
            cache, before = context.cache.fork(), context.hidden[:, None]
            suffix = self._suffix(1, before.dtype, before.device)
            positions = cache.position[:, None] + torch.arange(suffix.shape[1], device=before.device)
            prompt = cache.view(0).valid[:, None, None, :].expand(-1, -1, suffix.shape[1], -1)
            mask = torch.cat((prompt, prompt.new_ones(1, 1, suffix.shape[1], suffix.shape[1])), dim=3)
            hidden = torch.cat((before, self.decoder(suffix, positions, cache, mask)), dim=1)
            actions = self._regress(hidden[:, : self.config.horizon * self.config.dims])
        return ActionChunk(actions[0].to(observation.state.device), observation.stamp, producer="parallel")

    def predict(self, embeddings: Float[Tensor, "b s d"], valid: Bool[Tensor, "b s"]) -> Float[Tensor, "b h a"]:
        """The published pass over prompts of equal length (padding anywhere but at the end) and placeholders, gradients included."""
        rows, prompt, _ = embeddings.shape
        suffix = self._suffix(rows, embeddings.dtype, embeddings.device)
        seen = torch.cat((valid, valid.new_ones(rows, suffix.shape[1])), dim=1)
        mask = (seen[:, None, :, None] & seen[:, None, None, :]).contiguous()
        hidden = self.decoder(torch.cat((embeddings, suffix), dim=1), positions_of(seen), NoCache(), mask)
        return self._regress(hidden[:, prompt - 1 : prompt - 1 + self.config.horizon * self.config.dims])

    def loss(self, predicted: Float[Tensor, "b h a"], actions: Float[Tensor, "b h a"]) -> Float[Tensor, ""]:
        """Mean absolute error."""
        return F.l1_loss(predicted, actions)

    def _suffix(self, rows: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "b s d"]:
        config = self.config
        empty = torch.zeros(rows, config.horizon * config.dims, config.width, dtype=dtype, device=device)
        stop = self.decoder.embed(torch.full((rows, 1), config.stop, device=device)).to(dtype)
        return torch.cat((empty, stop), dim=1)

    def _regress(self, hidden: Float[Tensor, "b s d"]) -> Float[Tensor, "b h a"]:
        actions: Tensor = self.mlp(hidden.reshape(hidden.shape[0], self.config.horizon, -1).to(self.mlp.out.weight.dtype))
        return actions.float()
