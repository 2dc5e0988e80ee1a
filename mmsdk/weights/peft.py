"""Adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors, made ready for a decoder of ours.

    updates = read_adapter(folder, decoder)
    updates = read_adapter(folder, decoder, sees(encoder, connector))      # and what sees, see `mmsdk.weights.peft_sight`

A module of PEFT's is called as in the model that it was trained on, behind "base_model.model.". Changed are the seven matrices of the
language model's layers, and those of the vision tower and the projector; an adapter that changes others is refused by their names. Ours
hold queries, keys and values in one matrix, and gate and up in another, so that their updates become one: down-projections one below the
other, up-projections each in its own rows and columns.
Names, shapes and ranks are checked before any number is read. The pickle adapter_model.bin is never opened.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmsdk.decoder.adapted import Update, numbers, outputs
from mmsdk.decoder.config import DecoderConfig, Grouped, Plain
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError, WeightsError
from mmsdk.weights.fields import read_fields
from mmsdk.weights.names import HUGGINGFACE
from mmsdk.weights.peft_config import LoraConfig, lora_config
from mmsdk.weights.peft_sight import Place, place_of
from mmsdk.weights.safetensors import Checkpoint, open_file

__all__ = ["CONFIG", "TENSORS", "read_adapter"]

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# No honest one comes near: its longest part names each layer's modules.
_LONGEST = 1 << 20
_MOST_NAMED = 8

_HEAD = "base_model.model."
_DOWN, _UP, _LENGTHS = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
_TENSOR = re.compile(rf"{re.escape(_HEAD)}(?P<module>.+?)\.(?:lora_A\.weight|lora_B\.weight|lora_magnitude_vector(?:\.weight)?)")
# How the language model is called within others, today and in earlier years; a vision tower's layers are behind other names.
_MODULE = re.compile(
    r"(?P<stem>(?:model\.)?(?:language_model\.|text_model\.)?(?:model\.)?)layers\.(?:0|[1-9][0-9]{0,3})"
    r"\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)"
)
_LAYER = "model.layers.{i}."
_FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        ours: tuple(name.removeprefix(_LAYER) for name in HUGGINGFACE.weights[ours])
        for ours in ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")
    }
)


@dataclass(frozen=True, slots=True)
class _Site:
    """One matrix that is changed: what the adapter calls it, its size in outputs and inputs, and the rank of its update.

    `rows` are those of the matrix of ours that it is, or is part of.
    """

    module: str
    outputs: int
    inputs: int
    rank: int
    scale: float
    rows: slice

    def shapes(self, dora: bool) -> dict[str, tuple[int, ...]]:
        """The tensors that make the update."""
        names = {_DOWN: (self.rank, self.inputs), _UP: (self.outputs, self.rank)} | ({_LENGTHS: (self.outputs,)} if dora else {})
        return {f"{_HEAD}{self.module}.{name}": shape for name, shape in names.items()}


def read_adapter(folder: Path, decoder: Decoder, sight: nn.Module = nn.ModuleDict()) -> dict[str, Update]:
    """The updates by the modules of the decoder and of `sight`, in the decoder's dtype and on its device.

    Raises WeightsError for files that are missing or damaged, ModelError for settings that are not supported, and, naming them, for
    tensors that are missing, left over, of another shape or not finite.
    """
    if not (isinstance(decoder.config.attention, Grouped) and isinstance(decoder.config.feed, Plain)):
        raise ModelError(f"{folder}: adapters are not supported for latent attention and mixtures of experts")
    config, checkpoint = _config(folder), _tensors(folder)
    words, seen = _modules(checkpoint, sight)
    sites = _sites(config, _stem(checkpoint, words), decoder.config) if words else {}
    looks = _looks(config, seen, sight)
    _check(checkpoint, config, [site for fused in (*sites.values(), *looks.values()) for site in fused])
    like = decoder.norm.weight
    return {
        **{name: _update(checkpoint, fused, config, decoder.get_submodule(name), like) for name, fused in sites.items()},
        **{name: _update(checkpoint, fused, config, sight.get_submodule(name), like) for name, fused in looks.items()},
    }


def _config(folder: Path) -> LoraConfig:
    path = folder / CONFIG
    if not path.is_file():
        raise WeightsError(f"{folder} has no {CONFIG}, so it is no adapter of PEFT's")
    if path.stat().st_size > _LONGEST:
        raise ModelError(f"{path} has {path.stat().st_size} bytes; no adapter's settings have more than {_LONGEST}")
    return lora_config(read_fields(path))


def _tensors(folder: Path) -> Checkpoint:
    """The tensors, each by the name that PEFT gives it today."""
    if not (folder / TENSORS).is_file():
        told = "; a pickle such as adapter_model.bin could run any code and is never opened: save it with safe_serialization=True"
        raise WeightsError(f"{folder} has no {TENSORS}{told}")
    return open_file(folder / TENSORS).renamed([(rf"\.{_LENGTHS}\.weight$", f".{_LENGTHS}")])


def _modules(checkpoint: Checkpoint, sight: nn.Module) -> tuple[list[str], dict[str, Place]]:
    """What is changed of the language model, and of what sees. Raises ModelError, naming them, for modules that are not changed here."""
    found = {name: _TENSOR.fullmatch(name) for name in checkpoint.files}
    strange = sorted(name for name, match in found.items() if match is None)
    if strange:
        raise ModelError(f"{checkpoint.folder} holds {_list(strange)}, which are no low-rank updates of a matrix and are not supported")
    modules = sorted({match["module"] for match in found.values() if match is not None})
    if not modules:
        raise ModelError(f"{checkpoint.folder / TENSORS} holds no tensors")
    linear = {name for name, module in sight.named_modules() if isinstance(module, nn.Linear)}
    seen = {module: place for module in modules for place in place_of(module) if place.module in linear}
    words = [module for module in modules if _MODULE.fullmatch(module)]
    foreign = [module for module in modules if module not in seen and module not in words]
    if foreign:
        told = "changed here are matrices of the language model's layers (q, k, v, o, gate, up and down_proj), and of what sees"
        raise ModelError(f"{checkpoint.folder} changes {_list(foreign)}; {told}: train it without the others (exclude_modules)")
    return words, seen


def _stem(checkpoint: Checkpoint, modules: Sequence[str]) -> str:
    """What stands in front of "layers" in all names."""
    stems = {match["stem"] for match in map(_MODULE.fullmatch, modules) if match is not None}
    if len(stems) > 1:
        raise ModelError(f"{checkpoint.folder} calls the language model by {len(stems)} names ({_list(sorted(stems))}), it must be one")
    return stems.pop()


def _sites(config: LoraConfig, stem: str, sizes: DecoderConfig) -> dict[str, list[_Site]]:
    """What is changed of the language model, by the modules of ours."""
    found: dict[str, list[_Site]] = {}
    for layer in range(sizes.layers):
        for ours, matrices in _FUSED.items():
            ends = accumulate(_size(matrix, sizes)[0] for matrix in matrices)
            rows = {matrix: slice(end - _size(matrix, sizes)[0], end) for matrix, end in zip(matrices, ends, strict=True)}
            names = {matrix: f"{stem}layers.{layer}.{matrix}" for matrix in matrices}
            changed = [
                _Site(name, *_size(matrix, sizes), config.rank_of(name), config.scale_of(name), rows[matrix])
                for matrix, name in names.items()
                if config.changes(name, layer)
            ]
            if changed:
                found[f"layers.{layer}.{ours}"] = changed
    return found


def _looks(config: LoraConfig, seen: Mapping[str, Place], sight: nn.Module) -> dict[str, list[_Site]]:
    """What is changed of what sees, by the modules of ours: whatever the file has updates of."""
    found: dict[str, list[_Site]] = {}
    for module, place in seen.items():
        base = sight.get_submodule(place.module)
        assert isinstance(base, nn.Linear), "an adapter changes linear layers"
        size = base.out_features // place.parts
        rows = slice(place.part * size, (place.part + 1) * size)
        site = _Site(module, size, base.in_features, config.rank_of(module), config.scale_of(module), rows)
        found.setdefault(place.module, []).append(site)
    return found


def _check(checkpoint: Checkpoint, config: LoraConfig, sites: Sequence[_Site]) -> None:
    """Raises ModelError for tensors that are missing, left over or of another shape, by the header of the file alone."""
    shapes = {name: shape for site in sites for name, shape in site.shapes(config.dora).items()}
    checkpoint.fit(shapes.keys(), f"the adapter of its {CONFIG} on this model")
    wrong = [f"{name} {checkpoint.shape(name)} in place of {shape}" for name, shape in shapes.items() if checkpoint.shape(name) != shape]
    if wrong:
        raise ModelError(f"{checkpoint.folder} does not fit this model: {_list(wrong)}")


def _update(checkpoint: Checkpoint, fused: Sequence[_Site], config: LoraConfig, base: nn.Module, like: Tensor) -> Update:
    """The updates of the matrices that one of ours is made of, as one, in the dtype and on the device of `like`."""
    down = torch.cat([_read(checkpoint, site, _DOWN) for site in fused])
    up, column = torch.zeros(outputs(base), len(down)), 0
    for site in fused:
        up[site.rows, column : column + site.rank] = site.scale * _read(checkpoint, site, _UP)
        column += site.rank
    # the lengths of rows alone need the matrix in numbers, which for one in fewer bits takes time and memory
    factor = (_factor(checkpoint, fused, numbers(base).cpu() + up @ down),) if config.dora else ()
    return Update(down.to(like), up.to(like), tuple(one.to(like) for one in factor))


def _size(matrix: str, sizes: DecoderConfig) -> tuple[int, int]:
    """Outputs and inputs of a matrix."""
    heads, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    outputs = {"q_proj": heads, "k_proj": kv, "v_proj": kv, "gate_proj": sizes.inner, "up_proj": sizes.inner}
    inputs = {"o_proj": heads, "down_proj": sizes.inner}
    name = matrix.partition(".")[2]
    return outputs.get(name, sizes.width), inputs.get(name, sizes.width)


def _factor(checkpoint: Checkpoint, fused: Sequence[_Site], updated: Float[Tensor, "o i"]) -> Float[Tensor, " o"]:
    """The learned length of each row over the one that it has; 1 for the rows of matrices that are not changed."""
    factor = torch.ones(len(updated))
    for site in fused:
        factor[site.rows] = _read(checkpoint, site, _LENGTHS) / torch.linalg.norm(updated[site.rows], dim=1)
    if not factor.isfinite().all():
        raise ModelError(f"{checkpoint.folder}: rows of {_list([site.module for site in fused])} have no length")
    return factor


def _read(checkpoint: Checkpoint, site: _Site, kind: str) -> Float[Tensor, "..."]:
    """One tensor in float32. Raises ModelError where it holds numbers that are not finite."""
    name = f"{_HEAD}{site.module}.{kind}"
    tensor = checkpoint.tensor(name).float()
    if not tensor.isfinite().all():
        raise ModelError(f"{checkpoint.folder}: the tensor {name!r} holds numbers that are not finite")
    return tensor


def _list(names: Sequence[str]) -> str:
    """Names for a message, the first of many."""
    shown, more = ", ".join(names[:_MOST_NAMED]), len(names) - _MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
