"""From what a user calls a model to the family that runs it: "mini", a folder, or "org/name".

A family is a module of `mmsdk.models` with `load(name, folder, dtype, device, quantize)`, and is named as `config.json` names its
`model_type`. The families of `mmsdk.models.text` are language models alone, which `mmsdk.models.language` runs.

    open_model("org/name", dtype, device, gguf_file="model-Q4_1.gguf")      # the language model from there, all else from the folder

A folder that training wrote has no config.json, and is told by the name of the adapter in it. Of a model on the hub these two are fetched
first, and the weights only once its family is known to be one that can be run.
"""

import difflib
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import torch

from mmsdk import plugins
from mmsdk.errors import ModelError
from mmsdk.models import text
from mmsdk.models.types import VLM
from mmsdk.quant.types import Quantize
from mmsdk.weights.bundle import adapter_name
from mmsdk.weights.fetch import Progress, quiet
from mmsdk.weights.fields import read_fields
from mmsdk.weights.folder import Folder
from mmsdk.weights.hub import SETTINGS, WEIGHTS, resolve

__all__ = ["NAMED", "families", "open_model"]

PACKAGE = "mmsdk.models"

NAMED = ("mini",)
"""What is known by name alone, and ships with what it was trained to."""


@runtime_checkable
class Family(Protocol):
    """What a family's module offers."""

    def load(self, name: str, found: Folder, dtype: torch.dtype, device: torch.device, quantize: Quantize) -> VLM:
        """Put the model of a folder together; `quantize` is for its language model."""
        ...


@runtime_checkable
class Bundled(Protocol):
    """What a family's module offers that is known by name."""

    def load(self, name: str, folder: Path | None, dtype: torch.dtype, device: torch.device, quantize: Quantize) -> VLM:
        """Put the model together as it ships, or with what training wrote into a folder."""
        ...


def families() -> list[str]:
    """The families that can be run: those with sight, then language models alone."""
    seeing = [name for name in plugins.available(PACKAGE) if name not in ("language", "text", "types")]
    return [*seeing, *(name for name in text.alone() if name not in seeing)]


def open_model(
    name: str, dtype: torch.dtype, device: torch.device, quantize: Quantize = "none", gguf_file: str = "", progress: Progress = quiet
) -> VLM:
    """Find the family of a model and load it; what is read of a folder's tensors is told as `progress`.

    `gguf_file` is a file, in the folder or anywhere, that the language model is read from in the place of the folder's own.
    Raises ModelError where nothing is known by that name or its family is not supported, WeightsError where weights cannot be had.
    """
    if name in NAMED:
        return _bundled(name, None, name, dtype, device, quantize, gguf_file)
    if "/" not in name and not Path(name).is_dir():
        close = difflib.get_close_matches(name, NAMED, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known by name: {', '.join(NAMED)}."
        raise ModelError(f'there is no model {name!r}; {hint} A folder or "org/name" works too, of a supported family: {_supported()}')
    kind = _kind(name, resolve(name, [SETTINGS, *map(adapter_name, NAMED)]))
    if kind in NAMED:
        return _bundled(kind, resolve(name), name, dtype, device, quantize, gguf_file)
    folder = Folder.of(resolve(name, [*WEIGHTS, *([gguf_file] if gguf_file else [])]), gguf_file)
    family = cast(Family, plugins.find(PACKAGE, kind if kind in plugins.available(PACKAGE) else "language"))
    with progress(f"loading {name}", folder.checkpoint.size) as told:
        return family.load(name, folder.telling(told), dtype, device, quantize)


def _bundled(
    kind: str, folder: Path | None, name: str, dtype: torch.dtype, device: torch.device, quantize: Quantize, gguf_file: str
) -> VLM:
    if gguf_file:
        raise ModelError(f"{name} brings its own language model; leave gguf_file={gguf_file!r} out")
    return cast(Bundled, plugins.find(PACKAGE, kind)).load(name, folder, dtype, device, quantize)


def _supported() -> str:
    return ", ".join([*NAMED, *(name for name in families() if name not in NAMED)])


def _kind(name: str, folder: Path) -> str:
    config = folder / SETTINGS
    if not config.is_file():
        trained = [family for family in NAMED if (folder / adapter_name(family)).is_file()]
        if not trained:
            raise ModelError(f"{name} has no {SETTINGS}, so its family is unknown; supported: {_supported()}")
        return trained[0]
    kind = read_fields(config).text("model_type", "")
    if kind not in families():
        raise ModelError(f"{name} is of the family {kind!r}, which is not supported; supported: {_supported()}")
    return kind
