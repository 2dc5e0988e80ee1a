"""ACT: a chunk of actions from a small encoder-decoder, trained as a conditional VAE (Zhao et al., arXiv 2304.13705) [published].

The encoder reads [latent ; state ; features of the pictures], the decoder's h learned queries become the actions. Positions are added to
queries and keys, never to values; norms come after the residuals, as in DETR. In training the latent comes from a second encoder over
[cls ; state ; actions]; at inference it is zero. The authors' code reads the first of its decoder layers, so there is one here. Their
pictures go through a ResNet; here features are whatever a vision encoder or the decoder gives, which changes the numbers, not the method.

Letters: b rows, n features, c width of a feature, p state, h actions, a numbers of an action, z latent, d width of the model.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.errors import InputError
from mmsdk.stages import Context
from mmsdk.vla.heads.state import padded
from mmsdk.vla.types import ActionChunk, Observation

__all__ = ["ACT", "ACTConfig", "ACTHead", "act_loss"]


@dataclass(frozen=True, slots=True)
class ACTConfig:
    """Sizes; the defaults are the paper's."""

    features: int = 512
    state_dim: int = 14
    action_dim: int = 14
    chunk: int = 100
    width: int = 512
    heads: int = 8
    inner: int = 3200
    encoder_layers: int = 4
    decoder_layers: int = 1
    latent: int = 32


class _EncoderLayer(nn.Module):
    """Attention to one another and feed-forward, each added and normed."""

    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(config.width, config.heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.up, self.down = nn.Linear(config.width, config.inner), nn.Linear(config.inner, config.width)

    def forward(self, x: Float[Tensor, "b n d"], place: Float[Tensor, "n d"], absent: Bool[Tensor, "b n"] | None = None) -> Tensor:
        at = x + place
        x = self.norm1(x + self.attention(at, at, x, key_padding_mask=absent, need_weights=False)[0])
        out: Tensor = self.norm2(x + self.down(F.relu(self.up(x))))
        return out


class _DecoderLayer(nn.Module):
    """Attention to one another, to the memory, and feed-forward, each added and normed."""

    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        self.itself = nn.MultiheadAttention(config.width, config.heads, batch_first=True)
        self.across = nn.MultiheadAttention(config.width, config.heads, batch_first=True)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(config.width) for _ in range(3))
        self.up, self.down = nn.Linear(config.width, config.inner), nn.Linear(config.inner, config.width)

    def forward(
        self, x: Float[Tensor, "b h d"], place: Float[Tensor, "h d"], memory: Float[Tensor, "b n d"], memory_place: Float[Tensor, "n d"]
    ) -> Tensor:
        at = x + place
        x = self.norm1(x + self.itself(at, at, x, need_weights=False)[0])
        x = self.norm2(x + self.across(x + place, memory + memory_place, memory, need_weights=False)[0])
        out: Tensor = self.norm3(x + self.down(F.relu(self.up(x))))
        return out


class ACT(nn.Module):
    """The network: `forward` is inference and the decoder half of training, `encode` the other half."""

    def __init__(self, config: ACTConfig = ACTConfig()) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.feature_in, self.state_in = nn.Linear(config.features, width), nn.Linear(config.state_dim, width)
        self.latent_in, self.action_out = nn.Linear(config.latent, width), nn.Linear(width, config.action_dim)
        self.token_place, self.query_place = nn.Parameter(torch.randn(2, width)), nn.Parameter(torch.randn(config.chunk, width))
        self.encoder = nn.ModuleList(_EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(_DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(width)
        self.vae = nn.ModuleList(_EncoderLayer(config) for _ in range(config.encoder_layers))
        self.vae_cls, self.vae_state_in = nn.Parameter(torch.randn(1, width)), nn.Linear(config.state_dim, width)
        self.vae_action_in, self.vae_out = nn.Linear(config.action_dim, width), nn.Linear(width, 2 * config.latent)

    def forward(
        self,
        features: Float[Tensor, "b n c"],
        cells: Int[Tensor, "n 2"],
        state: Float[Tensor, "b p"],
        latent: Float[Tensor, "b z"],
    ) -> Float[Tensor, "b h a"]:
        """Actions. `cells` are (y, x) of the features; those of several cameras stand one camera behind the other."""
        tokens = torch.stack((self.latent_in(latent), self.state_in(state)), dim=1)
        x = torch.cat((tokens, self.feature_in(features)), dim=1)
        place = torch.cat((self.token_place, _grid_sines(cells, self.config.width).to(x.dtype)))
        for layer in self.encoder:
            x = layer(x, place)
        memory, queries = x, x.new_zeros(x.shape[0], self.config.chunk, self.config.width)
        for layer in self.decoder:
            queries = layer(queries, self.query_place, memory, place)
        out: Tensor = self.action_out(self.norm(queries))
        return out

    def encode(
        self, state: Float[Tensor, "b p"], actions: Float[Tensor, "b h a"], valid: Bool[Tensor, "b h"]
    ) -> tuple[Float[Tensor, "b z"], Float[Tensor, "b z"]]:
        """Mean and log-variance of the latent that explains a demonstration."""
        rows = state.shape[0]
        x = torch.cat((self.vae_cls.expand(rows, 1, -1), self.vae_state_in(state)[:, None], self.vae_action_in(actions)), dim=1)
        place = _line_sines(x.shape[1], self.config.width, x.device).to(x.dtype)
        absent = torch.cat((valid.new_zeros(rows, 2), ~valid), dim=1)
        for layer in self.vae:
            x = layer(x, place, absent)
        mean, spread = self.vae_out(x[:, 0]).chunk(2, dim=-1)
        return mean, spread


@dataclass(frozen=True, slots=True)
class ACTHead:
    """An `ActionHead` whose single feature is what the decoder knows; the latent is zero. The first `dims` numbers leave it."""

    network: ACT
    dims: int

    def __post_init__(self) -> None:
        if not 1 <= self.dims <= self.network.config.action_dim:
            raise InputError(f"it is {self.dims}, the network predicts {self.network.config.action_dim}", item="dims")

    @torch.no_grad()
    def __call__(self, context: Context, observation: Observation) -> ActionChunk:
        """A chunk for one row. Raises InputError for a state that is too long or not finite."""
        config, dtype, device = self.network.config, self.network.action_out.weight.dtype, context.hidden.device
        state = padded(observation.state, config.state_dim).to(device, dtype)[None]
        cells, latent = torch.zeros(1, 2, dtype=torch.long, device=device), torch.zeros(1, config.latent, dtype=dtype, device=device)
        actions = self.network(context.hidden[:, None].to(dtype), cells, state, latent)
        return ActionChunk(actions[0, :, : self.dims].to(observation.state.device, torch.float32), observation.stamp, producer="act")


def act_loss(
    predicted: Float[Tensor, "b h a"],
    actions: Float[Tensor, "b h a"],
    valid: Bool[Tensor, "b h"],
    mean: Float[Tensor, "b z"],
    spread: Float[Tensor, "b z"],
    weight: float = 10.0,
) -> Float[Tensor, ""]:
    """Mean absolute error over valid actions, and `weight` times the divergence of the latent from a standard normal."""
    error = ((predicted - actions).abs().mean(-1) * valid).sum() / valid.sum().clamp_min(1)
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1).mean()
    return error + weight * divergence


def _line_sines(count: int, width: int, device: torch.device) -> Float[Tensor, "n d"]:
    """Sines and cosines of positions 0, 1, ..., taking turns (Vaswani et al., arXiv 1706.03762)."""
    return _waves(torch.arange(count, device=device, dtype=torch.float64), width).float()


def _grid_sines(cells: Int[Tensor, "n 2"], width: int) -> Float[Tensor, "n d"]:
    """DETR's: y in the first half of the width, x in the second, cells counted from 1 and scaled to 2 pi at the last."""
    count = cells.double() + 1
    scaled = count / (count.amax(0) + 1e-6) * (2 * torch.pi)
    return torch.cat([_waves(scaled[:, axis], width // 2) for axis in range(2)], dim=-1).float()


def _waves(x: Float[Tensor, " n"], width: int) -> Float[Tensor, "n w"]:
    """Dimension 2 i is a sine and 2 i + 1 a cosine of the same frequency."""
    angle = x[:, None] / 10_000 ** (2 * (torch.arange(width, device=x.device) // 2) / width)
    even = torch.arange(width, device=x.device) % 2 == 0
    return torch.where(even, angle.sin(), angle.cos())
