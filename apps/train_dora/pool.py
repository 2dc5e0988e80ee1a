"""The pictures that episodes are played on, seen once: the stream where the actor first looks, and what the whole transformer says.

Nothing before the first eligible block, and nothing of the dense prediction, depends on the actor, so that no episode computes it again.

Letters: n pictures, s tokens of a row, m patch tokens, d width, c names.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from mmsdk.apps.kept import write
from mmsdk.apps.train_dora.pictures import Probe
from mmsdk.apps.train_mini.features import check_origin
from mmsdk.vision.packed import Rows, received
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.vit import Block, ViT

__all__ = ["Pictures", "Pool", "see"]

Pictures = Callable[[range], tuple[UInt8[Tensor, "b 3 h w"], Float[Tensor, "b c"]]]


@dataclass(frozen=True, slots=True)
class Pool:
    """`stream` and `received` in front of the first eligible block; `cls`, `dense` and `evidence` (the log-odds of the likeliest name at
    each patch) from the end of the whole transformer; the true names."""

    stream: Float[Tensor, "n s d"]
    received: Float[Tensor, "n s"]
    cls: Float[Tensor, "n d"]
    dense: Float[Tensor, "n c"]
    evidence: Float[Tensor, "n m"]
    labels: Float[Tensor, "n c"]

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, numbers: list[int]) -> "Pool":
        """Some of the pictures."""
        return Pool(*(x[numbers] for x in asdict(self).values()))


@torch.no_grad()
def see(
    vit: ViT, probe: Probe, pictures: Pictures, count: int, block: int, path: Path | None = None, origin: str = "",
    fit: Preprocess = Preprocess(),
) -> Pool:  # fmt: skip
    """The first `count` pictures, cut in front of `block`; from the file if there is one, else written to it."""
    if path is not None and path.exists():
        check_origin(path, origin)
        return Pool(**load_file(path))
    parts = list[tuple[Tensor, ...]]()
    for start in tqdm(range(0, count, 8), desc="pictures of the pool", unit="batch", mininterval=5, disable=path is None):
        pixels, labels = pictures(range(start, min(count, start + 8)))
        parts.append((*_seen(vit, probe, fit(pixels).to(vit.position.dtype), block), labels))
    pool = Pool(*(torch.cat(column) for column in zip(*parts, strict=True)))
    if path is not None:
        write(path, asdict(pool), {"origin": origin})
    return pool


def _seen(vit: ViT, probe: Probe, pixels: Tensor, block: int) -> tuple[Tensor, ...]:
    embedded = vit.norm_first(vit.embed(pixels))
    rows = Rows.of(len(embedded), embedded.shape[1], vit.cls.shape[0], embedded.device)
    x, stream, looks = embedded.flatten(0, 1), embedded, torch.zeros(0)
    query = key = x[:0, None]
    for i, layer in enumerate(vit.blocks):
        assert isinstance(layer, Block)
        if i == block:
            stream, looks = x.unflatten(0, embedded.shape[:2]), received(query, key, rows).unflatten(0, embedded.shape[:2])
        x, query, key = layer.attend_rows(x, rows)
        x = layer.feed(x)
    states = vit.norm(x).unflatten(0, embedded.shape[:2])
    tokens = states[:, rows.first :]
    dense = probe(tokens, torch.ones(tokens.shape[:2], dtype=torch.bool))
    return stream, looks, states[:, 0].float(), dense, probe.patches(tokens).amax(dim=2)
