"""SVG2: queries and keys are clustered by meaning, clusters lie side by side, and query clusters read the key clusters that weigh most.

Source: Sparse VideoGen2, arXiv 2505.18875. Published: k-means, per head and step, of the queries to 300 and of the keys to 1000 centroids,
50 iterations at first and 2 from the step before's centroids later; S = Q_c K_c^T / sqrt(d), P_ij proportional to n_j exp(S_ij) with n_j
the tokens of key cluster j; of each row the smallest set with a mass of at least 0.9, and at least 0.10 of the clusters; tokens are
permuted by their label, attended to in blocks of unequal size, and permuted back. Reconstruction: k-means starts from tokens spread evenly
over the video, and no step or layer is dense unless asked for.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.diffusion.attention.blocks import heads_of, kept_mass, scores, share_of
from mmsdk.diffusion.attention.kmeans import kmeans
from mmsdk.diffusion.attention.layout import clusters, text_kept
from mmsdk.diffusion.attention.types import Choice, Everything, Place, Selection

__all__ = ["Svg2"]


@dataclass(frozen=True, slots=True)
class Svg2:
    """Centroids, the mass and the least share of clusters that are kept, iterations, and the shares of steps and layers that are dense."""

    query_centroids: int = 300
    key_centroids: int = 1000
    mass: float = 0.9
    least: float = 0.1
    first_iterations: int = 50
    later_iterations: int = 2
    dense_steps: float = 0.0
    dense_layers: float = 0.0
    block: int = 64

    def __call__(
        self, query: Float[Tensor, "b h s d"], keys: Float[Tensor, "b g s d"], values: Float[Tensor, "b g s d"], place: Place
    ) -> Choice:
        if place.step < self.dense_steps * place.steps or place.layer < self.dense_layers * place.layers:
            return Everything()
        h, grid = query.shape[1], place.grid
        starts = place.memory or (None, None)
        query_labels, query_centres = self._clustered(query.narrow(2, grid.before, grid.video), starts[0], self.query_centroids)
        key_labels, key_centres = self._clustered(keys.narrow(2, grid.before, grid.video), starts[1], self.key_centroids)
        rows, row_labels = clusters(query_labels, query_centres.shape[2], grid, self.block)
        columns, column_labels = clusters(key_labels, key_centres.shape[2], grid, self.block)
        tokens = _counts(key_labels, key_centres.shape[2])
        # empty clusters have -inf and no mass
        shares = (scores(query_centres, key_centres) + heads_of(tokens.log(), h)[:, :, None]).softmax(-1)
        kept = kept_mass(shares, self.mass, share_of(self.least, key_centres.shape[2]))
        mask = text_kept(_by_block(kept, row_labels, heads_of(column_labels, h)), row_labels, heads_of(column_labels, h))
        return Selection(mask, rows, columns, memory=(query_centres, key_centres))

    def _clustered(self, x: Float[Tensor, "b h n d"], warm: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        if warm is not None:
            return kmeans(x, warm, self.later_iterations)
        most = min(count, x.shape[2])
        spread = torch.arange(most, device=x.device) * x.shape[2] // most
        return kmeans(x, x.index_select(2, spread), self.first_iterations)


def _counts(labels: Int[Tensor, "b h n"], count: int) -> Float[Tensor, "b h count"]:
    ones = torch.ones(1, device=labels.device).expand(labels.shape)
    return torch.zeros(*labels.shape[:2], count, device=labels.device).scatter_add_(2, labels, ones)


def _by_block(
    kept: Bool[Tensor, "b h clusters clusters2"], rows: Int[Tensor, "b h rows"], columns: Int[Tensor, "b h columns"]
) -> Bool[Tensor, "b h rows columns"]:
    """The mask between clusters as one between their blocks; a block that holds no token reads nothing and is not read."""
    real = (rows < kept.shape[2])[..., None] & (columns < kept.shape[3])[:, :, None]
    row, column = rows.clamp(0, kept.shape[2] - 1), columns.clamp(0, kept.shape[3] - 1)
    wide = kept.gather(2, row[..., None].expand(-1, -1, -1, kept.shape[3]))
    return wide.gather(3, column[:, :, None].expand(-1, -1, rows.shape[2], -1)) & real
