"""Parts of a pipeline's folder in diffusers' layout that are other people's classes: text encoders, tokenizers, autoencoders.

`model_index.json` says of which class each is; only classes that are asked for by name are made, from safetensors, and nothing in the
folder is run. diffusers comes with the extra `video`.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mmsdk.errors import ModelError, WeightsError
from mmsdk.vision.values import shown
from mmsdk.weights.fields import Fields, read_fields

__all__ = ["INDEX", "Parts", "library"]

INDEX = "model_index.json"


def library(name: str) -> Any:
    """A package by its name, whose own warnings at its import are not ours. Raises ModelError, naming the extra, where it is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(name)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"the package {error.name} is not installed, which reads such a folder: pip install '.[video]' in the clone"
        ) from None


@dataclass(frozen=True, slots=True)
class Parts:
    """A pipeline's folder and what it says of its parts."""

    folder: Path
    index: Fields

    @staticmethod
    def of(folder: Path) -> "Parts":
        """Raises WeightsError where the folder has no index, ModelError where that is none."""
        return Parts(folder, read_fields(folder / INDEX))

    @property
    def kind(self) -> str:
        """The class of the pipeline."""
        return self.index.text("_class_name")

    def has(self, name: str) -> bool:
        """Whether there is such a part."""
        return any(isinstance(told, str) for told in self._told(name))

    def read(self, name: str, kinds: Sequence[str], dtype: torch.dtype, device: torch.device) -> Any:
        """A model, ready to run. Raises ModelError where it is missing or of another class than one of these."""
        package, kind = self._known(name, kinds)
        made = getattr(library(package), kind)
        how = {"torch_dtype" if package == "diffusers" else "dtype": dtype}
        model = self._from(made, name, use_safetensors=True, **how)
        return model.to(device).eval().requires_grad_(False)

    def tokenizer(self, name: str) -> Any:
        """A tokenizer. Raises ModelError where it is missing."""
        self._known(name, ())
        return self._from(library("transformers").AutoTokenizer, name, trust_remote_code=False)

    def settings(self, name: str, file: str) -> Fields:
        """What the file of a part says. Raises WeightsError where it cannot be read."""
        return read_fields(self.folder / name / file)

    def _told(self, name: str) -> tuple[object, ...]:
        told = self.index.values.get(name)
        return tuple(told) if isinstance(told, list) else ()

    def _known(self, name: str, kinds: Sequence[str]) -> tuple[str, str]:
        told = self._told(name)
        if not self.has(name) or not (self.folder / name).is_dir():
            raise ModelError(f"{self.folder}: its {name} is missing, a folder that {INDEX} names; fetch the whole model")
        package, kind = ("", "") if len(told) != 2 else (str(told[0]), str(told[1]))
        if kinds and (package not in ("diffusers", "transformers") or kind not in kinds):
            raise ModelError(f"{self.folder}: its {name} is {shown(list(told))}; known is {' or '.join(kinds)}")
        return package, kind

    def _from(self, made: Any, name: str, **how: object) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return made.from_pretrained(str(self.folder / name), local_files_only=True, **how)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            # whatever a library says of files that are not what it wants
            told = str(error).strip().partition("\n")[0]
            raise WeightsError(f"{self.folder / name} cannot be read: {type(error).__name__}: {told}") from error
