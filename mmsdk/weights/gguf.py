"""Language models from GGUF files: Llama, Qwen2 and Qwen3, whatever the blocks are quantised to, with their tokenizer.

    config, state, tokenizer = read_gguf(path, torch.bfloat16)
    decoder = Decoder.of(config, state)
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from jaxtyping import Shaped
from torch import Tensor

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.rope import Divided, Linear, Scaling, Unscaled, Yarn
from mmsdk.errors import ModelError, WeightsError
from mmsdk.tokenizer import TextTokenizer
from mmsdk.weights.gguf_file import GGUFFile, GGUFTensor, Value, read_file
from mmsdk.weights.gguf_tokenizer import tokenizer_of
from mmsdk.weights.names import GGUF, assemble, used

__all__ = ["read_gguf"]

_ROPE_DIVISORS = "rope_freqs.weight"
# Which of them store the rows of queries and keys in interleaved rotary order (pairs side by side) instead of halves.
_INTERLEAVED: Mapping[str, bool] = MappingProxyType({"llama": True, "qwen2": False, "qwen3": False})


def read_gguf(path: Path, dtype: torch.dtype) -> tuple[DecoderConfig, dict[str, Tensor], TextTokenizer]:
    """The decoder's config, its state in `dtype`, and the tokenizer of a GGUF file.

    Raises WeightsError for a damaged file, ModelError for an architecture, a rope scaling or a tokenizer that is not supported, and
    for tensors that are missing or left over.
    """
    file = read_file(path)
    header = _Header(file)
    config = _config(header)
    unknown = sorted(file.tensors.keys() - used(GGUF, config) - {_ROPE_DIVISORS})
    if unknown:
        raise ModelError(f"{path} holds a tensor {unknown[0]!r} that is not part of a {header.architecture} decoder")
    return config, assemble(GGUF, config, _Source(header, config), dtype), tokenizer_of(file.metadata)


class _Header:
    """The metadata of one architecture, with its types checked."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        found = file.metadata.get("general.architecture")
        if not isinstance(found, str) or found not in _INTERLEAVED:
            raise ModelError(f"{file.path} is of the architecture {found!r}; supported: {', '.join(_INTERLEAVED)}")
        self.architecture = found

    def get(self, key: str) -> Value | None:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int):
            raise ModelError(f"{self.file.path}: {self.architecture}.{key} is {value!r}, it must be a whole number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, float) or not math.isfinite(value):
            raise ModelError(f"{self.file.path}: {self.architecture}.{key} is {value!r}, it must be a finite number")
        return value

    def tensor(self, name: str) -> GGUFTensor:
        if name not in self.file.tensors:
            raise ModelError(f"{self.file.path} lacks the tensor {name!r}")
        return self.file.tensors[name]


def _config(header: _Header) -> DecoderConfig:
    if header.whole("expert_count", 0):
        raise ModelError(f"{header.file.path} is a mixture of experts, which is not supported")
    if header.whole("attention.sliding_window", 0):
        raise ModelError(f"{header.file.path} attends in a sliding window, which is not supported")
    heads, width = header.whole("attention.head_count"), header.whole("embedding_length")
    head_dim = header.whole("attention.key_length", width // max(heads, 1))
    for key in ("rope.dimension_count", "attention.value_length"):
        if header.whole(key, head_dim) != head_dim:
            raise ModelError(f"{header.file.path}: {key} is {header.whole(key)}, only the head's full width {head_dim} is supported")
    tensors = header.file.tensors
    return DecoderConfig(
        vocabulary=header.tensor(GGUF.embedding).shape[0],
        width=width,
        layers=header.whole("block_count"),
        heads=heads,
        kv_heads=header.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        inner=header.whole("feed_forward_length"),
        context=header.whole("context_length"),
        norm_eps=header.real("attention.layer_norm_rms_epsilon"),
        rope_theta=header.real("rope.freq_base", 10_000.0),
        rope_scaling=_scaling(header, head_dim),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tied=GGUF.head not in tensors,
    )


def _scaling(header: _Header, head_dim: int) -> Scaling:
    kind = header.get("rope.scaling.type") or "none"
    if _ROPE_DIVISORS in header.file.tensors:
        stored = header.tensor(_ROPE_DIVISORS)
        if stored.shape != (head_dim // 2,) or kind != "none":
            raise ModelError(f"{header.file.path}: the tensor {_ROPE_DIVISORS!r} does not fit heads of {head_dim} and rope scaling {kind!r}")
        divisors = torch.empty(stored.shape)
        stored.read(divisors)
        if not (divisors.isfinite() & (divisors > 0)).all():
            raise ModelError(f"{header.file.path}: the tensor {_ROPE_DIVISORS!r} must hold positive numbers")
        return Divided(tuple(divisors.tolist()))
    if kind == "none":
        return Unscaled()
    factor = header.real("rope.scaling.factor")
    if kind == "linear" and factor > 0:
        return Linear(factor)
    if kind == "yarn" and factor > 0:
        # llama.cpp scales by the same logarithm, and by attn_factor on top of it.
        amplitude = (0.1 * math.log(max(factor, 1.0)) + 1.0) * header.real("rope.scaling.attn_factor", 1.0)
        return Yarn(factor, header.whole("rope.scaling.original_context_length"), amplitude)
    raise ModelError(f"{header.file.path}: rope scaling {kind!r} by {factor} is not supported")


class _Source:
    """The file's tensors in our order of rows."""

    def __init__(self, header: _Header, config: DecoderConfig) -> None:
        self._header = header
        self._heads = {"attn_q": config.heads, "attn_k": config.kv_heads} if _INTERLEAVED[header.architecture] else {}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._header.tensor(name).shape

    def read(self, name: str, out: Tensor) -> None:
        tensor = self._header.tensor(name)
        heads = self._heads.get(name.split(".")[-2], 0)
        if not heads:
            tensor.read(out)
        elif len(tensor.shape) == 1:
            # A bias is stored as a single row, so that its values change places and not its blocks.
            tensor.read(out)
            out.copy_(_halves(out.clone(), heads, name))
        else:
            replace(tensor, data=_halves(tensor.data, heads, name)).read(out)


def _halves(stored: Shaped[Tensor, "r *c"], heads: int, name: str) -> Shaped[Tensor, "r *c"]:
    """Rows from interleaved rotary order (0, d/2, 1, d/2 + 1, ...) back to halves (0, 1, ..., d/2, d/2 + 1, ...), head by head."""
    if stored.shape[0] % (2 * heads):
        raise ModelError(f"tensor {name!r} has {stored.shape[0]} rows, which {heads} heads of an even width cannot share")
    return stored.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
