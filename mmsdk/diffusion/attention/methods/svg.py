"""SVG: each head is spatial or temporal, whichever mask loses less of a few sampled rows.

Source: Sparse VideoGen, arXiv 2502.01776. Published: a spatial head reads a band around each token, |q - k| <= ceil128(m frame) with the
frame's number of tokens, and the first frame; a temporal head reads the same band after tokens were permuted from frame by frame to place
by place, and is permuted back. For each head, at each step, 32 rows of queries are drawn; the mask whose output of these rows has the
smaller mean squared error to the dense output is taken. The band is as wide as makes 0.3 of the matrix with the text's rows and columns
(their scripts call it sparsity), m frame = n (1 - sqrt(1 - share)). The first 20 % of the steps and 3 % of the layers are dense.
Reconstruction: the band is one of blocks of 128, which covers the band of tokens, and the rows are drawn from a seed.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mmsdk.diffusion.attention.blocks import heads_of
from mmsdk.diffusion.attention.layout import raster, text_kept
from mmsdk.diffusion.attention.types import Blocks, Choice, Everything, Grid, Place, Selection

__all__ = ["Svg"]

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Svg:
    """The share of the matrix that is read, the rows drawn, the shares of steps and layers that are dense, and the seed."""

    share: float = 0.3
    samples: int = 32
    dense_steps: float = 0.2
    dense_layers: float = 0.03
    seed: int = 0

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], place: Place
    ) -> Choice:
        if place.step < self.dense_steps * place.steps or place.layer < self.dense_layers * place.layers:
            return Everything()
        grid, device = place.grid, query.device
        tiling = raster(grid, _BLOCK, device)
        at = torch.arange(tiling.count, device=device)
        band = (at[:, None] - at).abs() <= self.width(grid) // _BLOCK
        sink = at * _BLOCK < grid.frame
        spatial, temporal = (_with_text(near, tiling.tile) for near in (band | sink, band))
        natural = torch.arange(grid.tokens, device=device)
        order = _place_by_place(grid, device)
        k, v = heads_of(keys, query.shape[1]), heads_of(values, query.shape[1])
        rows = torch.randperm(grid.video, generator=torch.Generator().manual_seed(self.seed))[: self.samples].to(device) + grid.before
        block = _block_of(tiling.blocks, device)
        in_time = block.scatter(0, order, block)
        losses = _losses(query.index_select(2, rows), k, v, [spatial[block[rows]][:, block], temporal[in_time[rows]][:, in_time]])
        temporal_head = (losses[1] < losses[0])[..., None]
        blocks = Blocks(_BLOCK, grid.tokens, tiling.blocks.starts, torch.where(temporal_head, order, natural))
        return Selection(torch.where(temporal_head[..., None], temporal, spatial), blocks, blocks)

    def width(self, grid: Grid) -> int:
        """How far a token sees to either side, a multiple of 128."""
        text = grid.before + grid.after
        share = min(max(self.share - 2 * text / grid.tokens, 0.0), 1.0)
        return _BLOCK * math.ceil(grid.tokens * (1 - math.sqrt(1 - share)) / _BLOCK)


def _with_text(near: Bool[Tensor, "n n"], tile: Tensor) -> Bool[Tensor, "blocks blocks"]:
    inside = tile.clamp(min=0)
    return text_kept(near[inside][:, inside][None, None], tile, tile)[0, 0]


def _place_by_place(grid: Grid, device: torch.device) -> Tensor:
    """The tokens with all frames of a place of the picture side by side."""
    token = torch.arange(grid.tokens, device=device)
    video = token[grid.before : grid.before + grid.video].view(grid.frames, grid.frame).T.flatten()
    return torch.cat((token[: grid.before], video, token[grid.before + grid.video :]))


def _block_of(blocks: Blocks, device: torch.device) -> Tensor:
    """The block of each place."""
    sizes = blocks.sizes(device)[0, 0]
    return torch.arange(blocks.count, device=device).repeat_interleave(sizes, output_size=blocks.length)


def _losses(
    query: Float[Tensor, "b h r d"], keys: Float[Tensor, "b h n d"], values: Float[Tensor, "b h n d"], masks: list[Bool[Tensor, "r n"]]
) -> list[Float[Tensor, "b h"]]:
    """The mean squared error of each mask's output to the dense output."""
    weights = query.float() @ keys.float().transpose(2, 3) * query.shape[3] ** -0.5
    dense = weights.softmax(-1) @ values.float()
    outs = [weights.masked_fill(~mask, -torch.inf).softmax(-1) @ values.float() for mask in masks]
    return [(out - dense).square().mean((2, 3)) for out in outs]
