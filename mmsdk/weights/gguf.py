"""Language models from GGUF files.

    config, state, tokenizer = read_gguf(path, torch.bfloat16)
    decoder = Decoder.of(config, state)

Llama, Qwen2 and Qwen3, whatever the blocks are quantised to.
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
from mmsdk.errors import ModelError
from mmsdk.quant.int4 import Int4
from mmsdk.tokenizer import TextTokenizer
from mmsdk.weights.fields import Fields
from mmsdk.weights.gguf_blocks import as_int4
from mmsdk.weights.gguf_file import GGUFFile, GGUFTensor, read_file
from mmsdk.weights.gguf_tokenizer import tokenizer_of
from mmsdk.weights.names import GGUF, assemble, used
from mmsdk.weights.rope import stretched

__all__ = ["GGUFSource", "open_gguf", "open_inner", "read_gguf"]

_ROPE_DIVISORS = "rope_freqs.weight"
# Which of them store the rows of queries and keys in interleaved rotary order (pairs side by side) instead of halves.
_INTERLEAVED: Mapping[str, bool] = MappingProxyType({"llama": True, "qwen2": False, "qwen3": False})
# And of those that are only ever part of a larger model.
_INNER: Mapping[str, bool] = MappingProxyType({"qwen2vl": False, "qwen3vl": False})


def read_gguf(path: Path, dtype: torch.dtype) -> tuple[DecoderConfig, dict[str, Tensor], TextTokenizer]:
    """The decoder's config, its state in `dtype`, and the tokenizer of a GGUF file. Raises as `open_gguf` does."""
    config, source, tokenizer = open_gguf(path)
    return config, assemble(GGUF, config, source, dtype), tokenizer


def open_gguf(path: Path) -> tuple[DecoderConfig, "GGUFSource", TextTokenizer]:
    """The decoder's config, its tensors, which stay on disk until they are read, and the tokenizer of a GGUF file.

    Raises WeightsError for a damaged file, ModelError for an architecture, a rope scaling or a tokenizer that is not supported, and
    for tensors that are missing or left over, or an embedding that has fewer rows than the tokenizer has tokens.
    """
    file = read_file(path)
    config, source = _opened(file, _INTERLEAVED)
    tokenizer = tokenizer_of(file.metadata)
    tokenizer.fit(config.vocabulary, f"{path}: the tensor {GGUF.embedding!r}")
    return config, source, tokenizer


def open_inner(path: Path) -> tuple[DecoderConfig, "GGUFSource"]:
    """The same of the language model within a larger one, whose folder has the tokenizer, and the truth about rotary positions."""
    return _opened(read_file(path), {**_INTERLEAVED, **_INNER})


def _opened(file: GGUFFile, known: Mapping[str, bool]) -> tuple[DecoderConfig, "GGUFSource"]:
    header = _Header(file, known)
    config = _config(header)
    unknown = sorted(file.tensors.keys() - used(GGUF, config) - {_ROPE_DIVISORS})
    if unknown:
        raise ModelError(f"{file.path} holds a tensor {unknown[0]!r} that is not part of a {header.architecture} decoder")
    return config, GGUFSource(header, config)


class _Header:
    """The settings and tensors of one architecture."""

    def __init__(self, file: GGUFFile, known: Mapping[str, bool]) -> None:
        self.file = file
        self.architecture = Fields(str(file.path), file.metadata).text("general.architecture")
        if self.architecture not in known:
            raise ModelError(f"{file.path} is of the architecture {self.architecture!r}; supported: {', '.join(known)}")
        self.interleaved = known[self.architecture]
        prefix = f"{self.architecture}."
        own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        self.fields = Fields(f"{file.path}: {self.architecture}", own)

    def tensor(self, name: str) -> GGUFTensor:
        if name not in self.file.tensors:
            raise ModelError(f"{self.file.path} lacks the tensor {name!r}")
        return self.file.tensors[name]


def _config(header: _Header) -> DecoderConfig:
    fields = header.fields
    if fields.whole("expert_count", 0):
        raise ModelError(f"{header.file.path} is a mixture of experts, which is not supported")
    if fields.whole("attention.sliding_window", 0):
        raise ModelError(f"{header.file.path} attends in a sliding window, which is not supported")
    heads, width = fields.whole("attention.head_count"), fields.whole("embedding_length")
    head_dim = fields.whole("attention.key_length", width // max(heads, 1))
    for key in ("rope.dimension_count", "attention.value_length"):
        if fields.whole(key, head_dim) != head_dim:
            raise fields.wrong(key, f"{head_dim}, the width of a head")
    tensors = header.file.tensors
    return DecoderConfig(
        vocabulary=header.tensor(GGUF.embedding).shape[0],
        width=width,
        layers=fields.whole("block_count"),
        heads=heads,
        kv_heads=fields.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        inner=fields.whole("feed_forward_length"),
        context=fields.whole("context_length"),
        norm_eps=fields.real("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.real("rope.freq_base", 10_000.0),
        rope_scaling=_scaling(header, head_dim),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tied=GGUF.head not in tensors,
    )


def _scaling(header: _Header, head_dim: int) -> Scaling:
    fields = header.fields
    kind = fields.text("rope.scaling.type", "none")
    if _ROPE_DIVISORS in header.file.tensors:
        stored = header.tensor(_ROPE_DIVISORS)
        if stored.shape != (head_dim // 2,) or kind != "none":
            raise ModelError(f"{header.file.path}: {_ROPE_DIVISORS!r} does not fit heads of {head_dim} and rope scaling {kind!r}")
        divisors = torch.empty(stored.shape)
        stored.read(divisors)
        if not (divisors.isfinite() & (divisors > 0)).all():
            raise ModelError(f"{header.file.path}: the tensor {_ROPE_DIVISORS!r} must hold positive numbers")
        return Divided(tuple(divisors.tolist()))
    if kind == "none":
        return Unscaled()
    factor = fields.real("rope.scaling.factor")
    if kind == "linear" and factor > 0:
        return Linear(factor)
    if kind == "yarn" and factor > 0:
        # llama.cpp scales by the same logarithm, and by attn_factor on top of it.
        amplitude = (0.1 * math.log(max(factor, 1.0)) + 1.0) * fields.real("rope.scaling.attn_factor", 1.0)
        return Yarn(factor, stretched(fields, "rope.scaling.original_context_length"), amplitude)
    raise ModelError(f"{header.file.path}: rope scaling {kind!r} by {factor} is not supported")


class GGUFSource:
    """The file's tensors in our order of rows; see `mmsdk.weights.names.Source`."""

    def __init__(self, header: _Header, config: DecoderConfig) -> None:
        self._header = header
        self._heads = {"attn_q": config.heads, "attn_k": config.kv_heads} if header.interleaved else {}

    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first. Raises ModelError where there is no such tensor."""
        return self._header.tensor(name).shape

    def read(self, name: str, out: Tensor) -> None:
        """Write the tensor's values to `out`, which has its shape, in the dtype of `out`."""
        tensor = self._ordered(name)
        tensor.read(out)
        heads = self._interleaved(name)
        if heads and len(tensor.shape) == 1:
            # A bias is stored as a single row, so that its values change places and not its blocks.
            out.copy_(_halves(out.clone(), heads, name))

    def where(self, name: str) -> str:
        """See `mmsdk.weights.names.Source`."""
        return f"{self._header.file.path}: the tensor {name!r}"

    def int4(self, name: str) -> Int4 | None:
        """The matrix of that name code by code, where its blocks are int4; None where they are anything else."""
        tensor = self._ordered(name)
        return as_int4(tensor.data, tensor.kind)

    def _ordered(self, name: str) -> GGUFTensor:
        """The tensor with its rows of blocks in our order."""
        tensor, heads = self._header.tensor(name), self._interleaved(name)
        return replace(tensor, data=_halves(tensor.data, heads, name)) if heads and len(tensor.shape) > 1 else tensor

    def _interleaved(self, name: str) -> int:
        return self._heads.get(name.split(".")[-2], 0)


def _halves(stored: Shaped[Tensor, "r *c"], heads: int, name: str) -> Shaped[Tensor, "r *c"]:
    """Rows from interleaved rotary order (0, d/2, 1, d/2 + 1, ...) back to halves (0, 1, ..., d/2, d/2 + 1, ...), head by head."""
    if stored.shape[0] % (2 * heads):
        raise ModelError(f"tensor {name!r} has {stored.shape[0]} rows, which {heads} heads of an even width cannot share")
    halves: Tensor = stored.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return halves
