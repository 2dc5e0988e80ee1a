"""Name tables: what a decoder's tensors are called in each kind of checkpoint, and how they are joined into ours.

A table gives, for each tensor of ours, the checkpoint's tensors that are stacked (by rows) to make it; `{i}` is the layer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mmsdk.decoder.config import DecoderConfig
from mmsdk.errors import ModelError

__all__ = ["GGUF", "HUGGINGFACE", "Empty", "Names", "Naming", "Source", "assemble", "empty", "joined", "shape_of", "stored", "told", "used"]

Naming = Callable[[DecoderConfig], Mapping[str, tuple[str, ...]]]
"""For each tensor of a decoder, the checkpoint's tensors that make it."""

Empty = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes a tensor that holds anything yet."""

# Choices hang on their last digits, so that they stay in float32, as DeepSeek's own code and transformers keep them.
_WIDE = ("router.weight", "router.bias", "indexer.weights.weight")


@runtime_checkable
class Source(Protocol):
    """The tensors of a checkpoint by name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first. Raises ModelError where there is no such tensor."""
        ...

    def read(self, name: str, out: Tensor) -> None:
        """Write the tensor's values to `out`, which has its shape, in the dtype of `out`."""
        ...

    def where(self, name: str) -> str:
        """What messages call a tensor: the folder or file, and its name there."""
        ...


@dataclass(frozen=True, slots=True)
class Names:
    """One kind of checkpoint of Llama-like decoders. `weights` are there in every layer, `head_norms` where the config has them."""

    embedding: str
    norm: str
    head: str
    weights: Mapping[str, tuple[str, ...]] = field(repr=False)
    head_norms: Mapping[str, tuple[str, ...]] = field(repr=False)

    def __call__(self, config: DecoderConfig) -> dict[str, tuple[str, ...]]:
        """For each tensor of a decoder, the checkpoint's tensors that make it."""
        table: dict[str, tuple[str, ...]] = {"embedding.weight": (self.embedding,), "norm.weight": (self.norm,)}
        if not config.tied:
            table["head.weight"] = (self.head,)
        biased = {
            "attention.qkv": config.qkv_bias,
            "attention.o": config.o_bias,
            "mlp.gate_up": config.mlp_bias,
            "mlp.down": config.mlp_bias,
        }
        for i in range(config.layers):
            for ours, theirs in (self.weights if not config.qk_norm else {**self.weights, **self.head_norms}).items():
                for kind in ("weight", "bias") if biased.get(ours, False) else ("weight",):
                    table[f"layers.{i}.{ours}.{kind}"] = tuple(f"{name.format(i=i)}.{kind}" for name in theirs)
        return table


_HF = "model.layers.{i}."
HUGGINGFACE = Names(
    embedding="model.embed_tokens.weight",
    norm="model.norm.weight",
    head="lm_head.weight",
    weights=MappingProxyType(
        {
            "norm1": (_HF + "input_layernorm",),
            "attention.qkv": (_HF + "self_attn.q_proj", _HF + "self_attn.k_proj", _HF + "self_attn.v_proj"),
            "attention.o": (_HF + "self_attn.o_proj",),
            "norm2": (_HF + "post_attention_layernorm",),
            "mlp.gate_up": (_HF + "mlp.gate_proj", _HF + "mlp.up_proj"),
            "mlp.down": (_HF + "mlp.down_proj",),
        }
    ),
    head_norms=MappingProxyType({"attention.q_norm": (_HF + "self_attn.q_norm",), "attention.k_norm": (_HF + "self_attn.k_norm",)}),
)

_BLK = "blk.{i}."
GGUF = Names(
    embedding="token_embd.weight",
    norm="output_norm.weight",
    head="output.weight",
    weights=MappingProxyType(
        {
            "norm1": (_BLK + "attn_norm",),
            "attention.qkv": (_BLK + "attn_q", _BLK + "attn_k", _BLK + "attn_v"),
            "attention.o": (_BLK + "attn_output",),
            "norm2": (_BLK + "ffn_norm",),
            "mlp.gate_up": (_BLK + "ffn_gate", _BLK + "ffn_up"),
            "mlp.down": (_BLK + "ffn_down",),
        }
    ),
    head_norms=MappingProxyType({"attention.q_norm": (_BLK + "attn_q_norm",), "attention.k_norm": (_BLK + "attn_k_norm",)}),
)


def assemble(names: Naming, config: DecoderConfig, source: Source, dtype: torch.dtype) -> dict[str, Tensor]:
    """A decoder's state from a checkpoint's tensors, each read straight to its place. Raises ModelError where they do not fit together."""
    return {ours: joined(source, theirs, stored(ours, dtype)) for ours, theirs in names(config).items()}


def stored(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a decoder's tensor, by its name, in a decoder of this dtype."""
    return torch.float32 if name.endswith(_WIDE) else dtype


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """In the processor's memory, wherever there is some."""
    return torch.empty(tuple(shape), dtype=dtype)


def joined(source: Source, names: tuple[str, ...], dtype: torch.dtype, fresh: Empty = empty) -> Tensor:
    """The tensors stacked by rows, in what `fresh` makes. Raises ModelError where one is missing or their shapes do not allow it."""
    out = fresh(shape_of(source, names), dtype)
    for name, part in zip(names, out.split([source.shape(name)[0] for name in names]), strict=True):
        source.read(name, part)
    return out


def shape_of(source: Source, names: tuple[str, ...]) -> tuple[int, ...]:
    """The shape of the tensors stacked by rows. Raises ModelError where one is missing or their shapes do not allow it."""
    shapes = [source.shape(name) for name in names]
    if len({shape[1:] for shape in shapes}) != 1 or () in shapes:
        raise ModelError(f"{told(source, names)} cannot be stacked: the shapes are {', '.join(map(str, shapes))}")
    return sum(shape[0] for shape in shapes), *shapes[0][1:]


def told(source: Source, names: tuple[str, ...]) -> str:
    """What messages call the tensors that make one of a decoder's."""
    beside = f" with {', '.join(map(repr, names[1:4]))}{' and more' if len(names) > 4 else ''}" if len(names) > 1 else ""
    return source.where(names[0]) + beside


def used(names: Naming, config: DecoderConfig) -> set[str]:
    """Every tensor of the checkpoint that the decoder is made of."""
    return {name for theirs in names(config).values() for name in theirs}
