"""What is trained for braco, as one safetensors file: a set for each budget, and the calibrated bases of some grids.

Tensors of a set are named `{media}.{count}.{part}`, as in "image.11.score"; media is image or clip. Parts are embedding, score, down, up,
bias and skew.{t}x{u}x{v} for boxes of coefficients; of a single scoring vector score, down and up may lack the first axis.
`calibration.{t}x{h}x{w}` are the leading principal directions of a grid's cells, one a row. Metadata: `basis`, which the sets were trained
on, and `residual`, a JSON object from "image.11" to the residual tokens of the set.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import safetensors
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.errors import ModelError, PluginError
from mmsdk.tokencomp.transform import Grid, cayley, orthonormal

__all__ = ["Coder", "Trained", "coder_path", "read_coder", "untrained"]

PARTS = ("embedding", "score", "down", "up", "bias")
_NAME = re.compile(r"(?:image|clip)\.\d+\.(?:embedding|score|down|up|bias|skew\.\d+x\d+x\d+)|calibration\.\d+x\d+x\d+")


@dataclass(frozen=True, slots=True)
class Trained:
    """What training adds at one budget, of which `residual` tokens at least are residual ones; all zeros is braco untrained.

    Each of the p scoring vectors pools in its own way, and has a part of the residual map, of rank r. What training never met stays as it
    began: no embedding beyond the table, no rotation of boxes that are not in `skew`.
    """

    residual: int
    embedding: Float[Tensor, "t u v d"]
    skew: Mapping[tuple[int, ...], Float[Tensor, "k k"]]
    score: Float[Tensor, "p d"]
    down: Float[Tensor, "p d r"]
    up: Float[Tensor, "p r d"]
    bias: Float[Tensor, " d"]

    def embedded(self, index: Int[Tensor, "k 3"]) -> Float[Tensor, "k d"]:
        """The embedding of each coefficient (t, u, v)."""
        (t, u, v), (times, rows, columns) = index.unbind(dim=1), self.embedding.shape[:3]
        known = (t < times) & (u < rows) & (v < columns)
        return self.embedding[t * known, u * known, v * known] * known[:, None]

    def turned(self, shape: tuple[int, ...], start: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
        """The rotation of a box of coefficients: Cayley's, of what was trained, times the one it started from."""
        return cayley(self.skew[shape].to(start.dtype)) @ start if shape in self.skew else start

    def mapped(self, pooled: Float[Tensor, "b p k d"]) -> Float[Tensor, "b k d"]:
        """Residual tokens: what the first scoring vector pools, and what the map makes of what all pool, which untrained is nothing."""
        return pooled[:, 0] + (pooled @ self.down @ self.up).sum(dim=1) + self.bias


@dataclass(frozen=True, slots=True)
class Coder:
    """A file: sets by (media, count), for embeddings `width` wide in coordinates of `basis`, and calibrated directions by grid."""

    name: str
    basis: str
    width: int
    sets: Mapping[tuple[str, int], Trained]
    calibration: Mapping[Grid, Float[Tensor, "k n"]]

    @property
    def budgets(self) -> str:
        """What it was trained for, in words."""
        return (
            ", ".join(f"{count} tokens of {'a clip' if media == 'clip' else 'an image'}" for media, count in sorted(self.sets)) or "nothing"
        )


def untrained(width: int, residual: int, device: torch.device) -> Trained:
    """Braco without training."""
    zeros = torch.zeros(width, device=device)
    return Trained(residual, zeros.expand(1, 1, 1, width), {}, zeros[None], zeros[None, :, None], zeros[None, None], zeros)


def coder_path(name: str) -> Path:
    """Where a coder is: one that ships with the package by its name ("mini"), or a path that ends in .safetensors.

    Raises PluginError where there is none.
    """
    path = Path(name) if name.endswith(".safetensors") else Path(__file__).parent / f"braco_{name}.safetensors"
    if not path.is_file():
        shipped = sorted(found.stem.removeprefix("braco_") for found in Path(__file__).parent.glob("braco_*.safetensors"))
        raise PluginError(
            f"braco has no trained coder {name!r}: there is {', '.join(shipped) or 'none'}; leave it out to compress without training, "
            "or train one with `python -m mmsdk.apps.train_braco` and give the path of its .safetensors file"
        )
    return path


@cache
def read_coder(name: str, device: torch.device) -> Coder:
    """A coder by name or path, in float32 on a device; read once. Raises PluginError where there is none, ModelError for a bad file."""
    path = coder_path(name)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key).float().to(device) for key in file.keys()}  # noqa: SIM118 - the file is no mapping
            metadata = file.metadata() or {}
        residual = {key: int(count) for key, count in dict(json.loads(metadata["residual"])).items()}
        basis = metadata["basis"]
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as a coder of braco: {error}") from error
    for key in tensors:
        if not _NAME.fullmatch(key):
            raise ModelError(f"{path} holds a tensor {key!r} that is no part of a coder")
    directions = {_grid(key.removeprefix("calibration.")): tensors.pop(key) for key in list(tensors) if key.startswith("calibration.")}
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        media, count, part = key.split(".", 2)
        parts.setdefault(f"{media}.{count}", {})[part] = tensor
    sets = {key: _set(path, key, found, residual) for key, found in parts.items()}
    widths = {len(one.bias) for one in sets.values()}
    if len(widths) > 1:
        raise ModelError(f"{path} holds sets of different widths {sorted(widths)}")
    # rows that were rounded to 16 bits
    whole = {grid: orthonormal(rows.double().T).T.float() for grid, rows in directions.items()}
    by_budget = {(key.split(".")[0], int(key.split(".")[1])): one for key, one in sets.items()}
    return Coder(name, basis, next(iter(widths), 0), by_budget, whole)


def _set(path: Path, key: str, parts: Mapping[str, Tensor], residual: Mapping[str, int]) -> Trained:
    missing = [part for part in PARTS if part not in parts]
    if missing or key not in residual:
        raise ModelError(f"{path}: the set {key} lacks {', '.join(missing) or 'its number of residual tokens'}")
    skew: dict[tuple[int, ...], Tensor] = {
        _grid(name.removeprefix("skew.")): tensor for name, tensor in parts.items() if name.startswith("skew.")
    }
    embedding, score, down, up, bias = (parts[part] for part in PARTS)
    if score.ndim == 1:
        score, down, up = score[None], down[None], up[None]
    pools, width, rank = len(score), bias.numel(), up.shape[1] if up.ndim == 3 else 0
    fits = embedding.ndim == 4 and embedding.shape[3] == width and score.shape == (pools, width) and bias.shape == (width,)
    if not fits or not pools or down.shape != (pools, width, rank) or up.shape != (pools, rank, width):
        raise ModelError(f"{path}: the parts of the set {key} do not fit each other")
    return Trained(residual[key], embedding, skew, score, down, up, bias)


def _grid(text: str) -> Grid:
    t, u, v = (int(side) for side in text.split("x"))
    return t, u, v
