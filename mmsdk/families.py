"""From what a user calls a model to the family that runs it: "mini", a folder, "org/name", or the GGUF file of a language model alone.

A family is a module of `mmsdk.models` with `load(name, folder, dtype, device, quantize)`, and is named as `config.json` names its
`model_type`. The families of `mmsdk.models.text` are language models alone, which `mmsdk.models.language` runs.

    open_model("org/name", dtype, device, gguf_file="model-Q4_1.gguf")      # the language model from there, all else from the folder

A folder that training wrote has no config.json, and is told by the name of the adapter in it. Of a model on the hub these two are fetched
first, and the weights only once its family is known to be one that can be run.
"""

import difflib
import os
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import torch

from mmsdk import plugins
from mmsdk.errors import ModelError, WeightsError
from mmsdk.models import text
from mmsdk.models.types import VLM
from mmsdk.quant.types import Quantize
from mmsdk.vision.values import cause
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


@runtime_checkable
class Filed(Protocol):
    """What the module of language models alone offers beside that."""

    def load_file(self, name: str, path: Path, dtype: torch.dtype, device: torch.device, quantize: Quantize) -> VLM:
        """The model of a GGUF file, with nothing beside it."""
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
    file = Path(os.path.expanduser(name))
    if file.is_file():
        return _from_file(name, file, dtype, device, quantize, gguf_file)
    if name.lower().endswith(".gguf"):
        raise ModelError(f"there is no file {name!r}")
    if "/" not in name and not Path(name).is_dir():
        close = difflib.get_close_matches(name, NAMED, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known by name: {', '.join(NAMED)}."
        others = f'A folder or "org/name" works too, of a supported family: {_supported()}; and the GGUF file of a language model'
        raise ModelError(f"there is no model {name!r}; {hint} {others}")
    kind = _kind(name, resolve(name, [SETTINGS, *map(adapter_name, NAMED)]))
    if kind in NAMED:
        return _bundled(kind, resolve(name), name, dtype, device, quantize, gguf_file)
    folder = Folder.of(resolve(name, [*WEIGHTS, *([gguf_file] if gguf_file else [])]), gguf_file)
    family = cast(Family, plugins.find(PACKAGE, kind if kind in plugins.available(PACKAGE) else "language"))
    with progress(f"loading {name}", folder.checkpoint.size) as told:
        return family.load(name, folder.telling(told), dtype, device, quantize)


def _from_file(name: str, file: Path, dtype: torch.dtype, device: torch.device, quantize: Quantize, gguf_file: str) -> VLM:
    """A language model alone, which a GGUF file can be. Raises ModelError for any other file, saying what to name instead."""
    try:
        with file.open("rb") as opened:
            known = opened.read(4) == b"GGUF"
    except OSError as error:
        raise WeightsError(f"{name} cannot be read: {cause(error)}") from error
    if not known:
        raise ModelError(f"{name} is a file, and no GGUF file; name the folder that it lies in, with config.json and tokenizer.json")
    if gguf_file:
        raise ModelError(f"{name} is a GGUF file itself; name a folder as the model beside gguf_file={gguf_file!r}, or leave that out")
    try:
        return cast(Filed, plugins.find(PACKAGE, "language")).load_file(name, file, dtype, device, quantize)
    except ModelError as error:
        told = f"where a folder has the model's config.json and tokenizer.json, name that as the model, and gguf_file={name!r}"
        raise ModelError(f"{error}; {told}") from error


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
        files = sorted(path.name for path in folder.glob("*.gguf"))
        if not trained and files:
            beside = "put config.json, tokenizer.json and the chat template beside it, and what a model that sees has more"
            alone = folder / files[0]
            raise ModelError(
                f"{name} has no {SETTINGS}: {beside}; or name the file itself, of a language model alone: model={str(alone)!r}"
            )
        if not trained:
            raise ModelError(f"{name} has no {SETTINGS}, so its family is unknown; supported: {_supported()}")
        return trained[0]
    kind = read_fields(config).text("model_type", "")
    if kind not in families():
        raise ModelError(f"{name} is of the family {kind!r}, which is not supported; supported: {_supported()}")
    return kind
