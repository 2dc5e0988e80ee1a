"""Adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors, made ready for a decoder of ours.

    updates = read_adapter(folder, decoder)

A module of PEFT's is called as in the model that it was trained on, behind "base_model.model.". Here only the seven matrices of the
language model's layers are changed; an adapter that changes others, such as those of a vision tower, is refused by their names. Ours hold
queries, keys and values in one matrix, and gate and up in another, so that their updates become one: down-projections one below the other,
up-projections each in its own rows and columns.
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
from torch import Tensor

from mmsdk.decoder.adapted import Update, numbers
from mmsdk.decoder.config import DecoderConfig, Grouped, Plain
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError, WeightsError
from mmsdk.weights.fields import read_fields
from mmsdk.weights.names import HUGGINGFACE
from mmsdk.weights.peft_config import LoraConfig, lora_config
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
    """One matrix that is changed: what the adapter calls it, its size in outputs and inputs, and the rank of its update."""

    module: str
    outputs: int
    inputs: int
    rank: int
    scale: float

    def shapes(self, dora: bool) -> dict[str, tuple[int, ...]]:
        """The tensors that make the update."""
        names = {_DOWN: (self.rank, self.inputs), _UP: (self.outputs, self.rank)} | ({_LENGTHS: (self.outputs,)} if dora else {})
        return {f"{_HEAD}{self.module}.{name}": shape for name, shape in names.items()}


def read_adapter(folder: Path, decoder: Decoder) -> dict[str, Update]:
    """The updates by the decoder's modules, in its dtype and on its device.

    Raises WeightsError for files that are missing or damaged, ModelError for settings that are not supported, and, naming them, for
    tensors that are missing, left over, of another shape or not finite.
    """
    if not (isinstance(decoder.config.attention, Grouped) and isinstance(decoder.config.feed, Plain)):
        raise ModelError(f"{folder}: adapters are not supported for latent attention and mixtures of experts")
    config, checkpoint = _config(folder), _tensors(folder)
    sites = _sites(config, _stem(checkpoint), decoder.config)
    _check(checkpoint, config, [site for fused in sites.values() for site in fused.values()])
    return {name: _update(checkpoint, fused, name, config, decoder) for name, fused in sites.items()}


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


def _stem(checkpoint: Checkpoint) -> str:
    """What stands in front of "layers" in all names. Raises ModelError, naming them, for modules that are not changed here."""
    found = {name: _TENSOR.fullmatch(name) for name in checkpoint.files}
    strange = sorted(name for name, match in found.items() if match is None)
    if strange:
        raise ModelError(f"{checkpoint.folder} holds {_list(strange)}, which are no low-rank updates of a matrix and are not supported")
    modules = {match["module"]: _MODULE.fullmatch(match["module"]) for match in found.values() if match is not None}
    foreign = sorted(module for module, match in modules.items() if match is None)
    if foreign:
        told = "only the matrices of the language model's layers are changed here (q, k, v, o, gate, up and down_proj)"
        raise ModelError(f"{checkpoint.folder} changes {_list(foreign)}; {told}: train it without the others (exclude_modules)")
    stems = {match["stem"] for match in modules.values() if match is not None}
    if not stems:
        raise ModelError(f"{checkpoint.folder / TENSORS} holds no tensors")
    if len(stems) > 1:
        raise ModelError(f"{checkpoint.folder} calls the language model by {len(stems)} names ({_list(sorted(stems))}), it must be one")
    return stems.pop()


def _sites(config: LoraConfig, stem: str, sizes: DecoderConfig) -> dict[str, dict[str, _Site]]:
    """What is changed, by the modules of ours and the matrices that these are made of."""
    found: dict[str, dict[str, _Site]] = {}
    for layer in range(sizes.layers):
        for ours, matrices in _FUSED.items():
            names = {matrix: f"{stem}layers.{layer}.{matrix}" for matrix in matrices}
            changed = {matrix: name for matrix, name in names.items() if config.changes(name, layer)}
            if changed:
                found[f"layers.{layer}.{ours}"] = {
                    matrix: _Site(name, *_size(matrix, sizes), config.rank_of(name), config.scale_of(name))
                    for matrix, name in changed.items()
                }
    return found


def _check(checkpoint: Checkpoint, config: LoraConfig, sites: Sequence[_Site]) -> None:
    """Raises ModelError for tensors that are missing, left over or of another shape, by the header of the file alone."""
    shapes = {name: shape for site in sites for name, shape in site.shapes(config.dora).items()}
    checkpoint.fit(shapes.keys(), f"the adapter of its {CONFIG} on this model")
    wrong = [f"{name} {checkpoint.shape(name)} in place of {shape}" for name, shape in shapes.items() if checkpoint.shape(name) != shape]
    if wrong:
        raise ModelError(f"{checkpoint.folder} does not fit this model: {_list(wrong)}")


def _update(checkpoint: Checkpoint, fused: Mapping[str, _Site], name: str, config: LoraConfig, decoder: Decoder) -> Update:
    """The updates of the matrices that one of ours is made of, as one."""
    base, dtype, device = decoder.get_submodule(name), decoder.norm.weight.dtype, decoder.norm.weight.device
    rows = {matrix: _size(matrix, decoder.config)[0] for matrix in _FUSED[name.split(".", 2)[2]]}
    places = {matrix: slice(end - rows[matrix], end) for matrix, end in zip(rows, accumulate(rows.values()), strict=True)}
    down = torch.cat([_read(checkpoint, site, _DOWN) for site in fused.values()])
    up, column = torch.zeros(sum(rows.values()), len(down)), 0
    for matrix, site in fused.items():
        up[places[matrix], column : column + site.rank] = site.scale * _read(checkpoint, site, _UP)
        column += site.rank
    factor: tuple[Tensor, ...] = ()
    if config.dora:
        factor = (_factor(checkpoint, fused, places, numbers(base).cpu() + up @ down),)
    return Update(down.to(device, dtype), up.to(device, dtype), tuple(one.to(device, dtype) for one in factor))


def _size(matrix: str, sizes: DecoderConfig) -> tuple[int, int]:
    """Outputs and inputs of a matrix."""
    heads, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    outputs = {"q_proj": heads, "k_proj": kv, "v_proj": kv, "gate_proj": sizes.inner, "up_proj": sizes.inner}
    inputs = {"o_proj": heads, "down_proj": sizes.inner}
    name = matrix.partition(".")[2]
    return outputs.get(name, sizes.width), inputs.get(name, sizes.width)


def _factor(
    checkpoint: Checkpoint, fused: Mapping[str, _Site], places: Mapping[str, slice], updated: Float[Tensor, "o i"]
) -> Float[Tensor, " o"]:
    """The learned length of each row over the one that it has; 1 for the rows of matrices that are not changed."""
    factor = torch.ones(len(updated))
    for matrix, site in fused.items():
        factor[places[matrix]] = _read(checkpoint, site, _LENGTHS) / torch.linalg.norm(updated[places[matrix]], dim=1)
    if not factor.isfinite().all():
        raise ModelError(f"{checkpoint.folder}: rows of {_list([site.module for site in fused.values()])} have no length")
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
