"""STA: attention within a three-dimensional window, from tile to tile.

Source: Fast Video Generation with Sliding Tile Attention, arXiv 2502.04507. Published: tokens lie tile by tile, 6 x 8 x 8 of them each;
every tile of queries reads the whole tiles of keys of a window that slides by tiles and is moved inside at an edge, so that no tile is ever
read in part. The window of 18 x 24 x 24 tokens, 3 x 3 x 3 tiles, is the paper's for HunyuanVideo; windows searched for each head are not
here.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mmsdk.diffusion.attention.layout import expanded, tiles, window
from mmsdk.diffusion.attention.types import Choice, Place, Selection

__all__ = ["Sta"]


@dataclass(frozen=True, slots=True)
class Sta:
    """The sides of a tile in tokens, and the sides of the window in tiles."""

    tile_frames: int = 6
    tile_height: int = 8
    tile_width: int = 8
    window_frames: int = 3
    window_height: int = 3
    window_width: int = 3
    block: int = 128

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], place: Place
    ) -> Choice:
        tiling = tiles(place.grid, (self.tile_frames, self.tile_height, self.tile_width), self.block, query.device)
        near = window(tiling.shape, (self.window_frames, self.window_height, self.window_width), True, query.device)
        mask = near.expand(*query.shape[:2], -1, -1)
        return Selection(expanded(mask, tiling.tile, tiling.tile), tiling.blocks, tiling.blocks)
