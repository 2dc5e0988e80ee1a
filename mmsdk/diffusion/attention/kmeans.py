"""k-means over the tokens of every head, batched, warm-started or from tokens spread evenly over the sequence."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["kmeans"]

# Entries of the matrix of tokens by centroids that may exist at one time: 256 MiB in float32.
_ENTRIES = 2**26


def kmeans(
    x: Float[Tensor, "b h n d"], start: Float[Tensor, "b h c d"], iterations: int
) -> tuple[Int[Tensor, "b h n"], Float[Tensor, "b h c d"]]:
    """The label of each token, that of its nearest centroid, and the centroids, means of their tokens, after Lloyd's iterations.

    A centroid without tokens stays where it is. Euclidean distances, float32.
    """
    x, centroids = x.float(), start.float()
    for _ in range(iterations):
        centroids = _means(x, _nearest(x, centroids), centroids)
    return _nearest(x, centroids), centroids


def _nearest(x: Float[Tensor, "b h n d"], centroids: Float[Tensor, "b h c d"]) -> Int[Tensor, "b h n"]:
    """argmin |x - c|^2, which is argmax x . c - |c|^2 / 2; of equals the earlier."""
    halves = centroids.square().sum(-1)[:, :, None] / 2
    step = max(1, _ENTRIES // (x.shape[0] * x.shape[1] * centroids.shape[2]))
    return torch.cat([(part @ centroids.transpose(2, 3) - halves).argmax(-1) for part in x.split(step, 2)], 2)


def _means(x: Float[Tensor, "b h n d"], labels: Int[Tensor, "b h n"], before: Float[Tensor, "b h c d"]) -> Float[Tensor, "b h c d"]:
    sums = torch.zeros_like(before).scatter_add_(2, labels[..., None].expand_as(x), x)
    counts = torch.zeros(before.shape[:3], device=x.device).scatter_add_(2, labels, torch.ones_like(labels, dtype=torch.float32))[..., None]
    return torch.where(counts > 0, sums / counts.clamp_min(1), before)
