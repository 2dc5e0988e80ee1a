"""What a layer of DeepSeek-V4 remembers beside its window, made from the stream and looked up again.

Nothing in a sliding layer; in an HCA layer an entry for every 128 tokens, all of which are read; in a CSA layer one for every four, of
which the indexer picks some. See `mmsdk.attention.hca` and `mmsdk.attention.csa` for the formulas.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mmsdk.attention.csa import Picked, overlapped
from mmsdk.attention.hca import Far, complete, pooled
from mmsdk.attention.indexer import picks
from mmsdk.attention.levels import Level
from mmsdk.decoder.deepseek_v4_config import DeepseekV4Config, Kind
from mmsdk.decoder.linear import Linear
from mmsdk.decoder.norm import RMSNorm
from mmsdk.decoder.trailing import TrailingRope, Turn
from mmsdk.kv.open_windows import Completed, Series
from mmsdk.kv.three_level import ThreeLevelCache

__all__ = ["Compressor", "Step", "past_of"]


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers share in one pass: the cache, the new tokens' positions and ids, and how they turn.

    `near` turns sliding layers; `far`, of the compressed rope, turns the others, whose entries stand at the first token of their window.
    """

    cache: ThreeLevelCache
    positions: Int[Tensor, "b s"]
    ids: Int[Tensor, "b s"]
    near: Turn
    far: Turn
    rope: TrailingRope


class Compressor(nn.Module):
    """One series of entries: projects tokens, lets them wait until their window is complete, and pools it."""

    def __init__(self, width: int, series: Series, place: int, norm_eps: float) -> None:
        super().__init__()
        self.series, self.place = series, place
        self.content = Linear(width, series.projected, bias=False)
        self.gates = Linear(width, series.projected, bias=False)
        self.bias = nn.Parameter(torch.zeros(series.rate, series.projected))
        self.norm = RMSNorm(series.width, norm_eps)

    def forward(self, x: Float[Tensor, "b s d"], step: Step, layer: int) -> Float[Tensor, "b t e"]:
        """Take the new tokens in; all entries so far."""
        completed = step.cache.collect(layer, self.place, self.content(x), self.gates(x))
        if completed is not None:
            step.cache.extend(layer, self.place, completed, self._entries(completed, step.rope))
        return step.cache.entries(layer, self.place)

    def _entries(self, completed: Completed, rope: TrailingRope) -> Float[Tensor, "b w e"]:
        content, gates = completed.content, completed.gates + self.bias
        if self.series.overlap:
            content, gates = overlapped(content), overlapped(gates)
        entries = self.norm(pooled(content, gates)).to(completed.content.dtype)
        windows = completed.first[:, None] + torch.arange(completed.count, device=entries.device)
        return rope(windows * self.series.rate)(entries[:, None])[:, 0]


class NoPast(nn.Module):
    """A sliding layer's: there is none."""

    def forward(self, x: Float[Tensor, "b s d"], latent: Float[Tensor, "b s r"], step: Step, layer: int) -> tuple[Level, ...]:
        """The levels that the new tokens attend to beside the window."""
        return ()


class HeavyPast(nn.Module):
    """An HCA layer's: all entries whose windows are complete."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        (series,) = config.series("hca")
        self.compressor = Compressor(config.stream, series, 0, config.norm_eps)

    def forward(self, x: Float[Tensor, "b s d"], latent: Float[Tensor, "b s r"], step: Step, layer: int) -> tuple[Level, ...]:
        """One level."""
        entries = self.compressor(x, step, layer)
        return (Far(entries, complete(step.positions, self.compressor.series.rate), step.cache.settled(layer, 0)),)


class SparsePast(nn.Module):
    """A CSA layer's: for each token the `topk` entries that its indexer picks; all of them as long as there are no more."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        entries, keys = config.series("csa")
        self.compressor = Compressor(config.stream, entries, 0, config.norm_eps)
        self.keys = Compressor(config.stream, keys, 1, config.norm_eps)
        self.query = Linear(config.query_rank, config.index_heads * config.index_dim, bias=False)
        self.weights = Linear(config.stream, config.index_heads, bias=False)
        self.topk, self.scale = config.index_topk, (config.index_heads * config.index_dim) ** -0.5

    def forward(self, x: Float[Tensor, "b s d"], latent: Float[Tensor, "b s r"], step: Step, layer: int) -> tuple[Level, ...]:
        """One level."""
        entries, keys = self.compressor(x, step, layer), self.keys(x, step, layer)
        seen, settled = complete(step.positions, self.compressor.series.rate), step.cache.settled(layer, 0)
        if entries.shape[1] <= self.topk:
            return (Far(entries, seen, settled),)
        heads = self.query(latent).unflatten(-1, (-1, keys.shape[-1])).transpose(1, 2)
        weights = self.weights(x).float() * self.scale
        return (Picked(entries, picks(step.far(heads).transpose(1, 2), weights, keys, seen, self.topk, settled)),)


def past_of(kind: Kind, config: DeepseekV4Config) -> NoPast | HeavyPast | SparsePast:
    """The past of a layer of this kind."""
    return HeavyPast(config) if kind == "hca" else SparsePast(config) if kind == "csa" else NoPast()
