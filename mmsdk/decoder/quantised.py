"""A decoder whose matrices are stored in fewer bits.

| tensor | int4 | int8 |
| --- | --- | --- |
| the matrices of every layer | int4 | int8 |
| the embedding and the head that is tied to it | int8, one for both | int8, one for both |
| a head of its own | int8 | int8 |
| an embedding that is not tied | as it is | as it is |
| norms and biases | as they are | as they are |

A head's errors go straight into the scores, with no later layer to even them out, so that it is not stored in four bits. An embedding is
read a row a token, so that fewer bits gain no time; where the head makes it worth it, both read the same bytes. Norms and biases are a
thousandth of the whole.
"""

import torch
from torch import nn

from mmsdk.decoder.config import DecoderConfig, Grouped, Plain
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError
from mmsdk.quant.int4 import Int4, Int4Linear
from mmsdk.quant.int8 import Int8, Int8Embedding, Int8Linear
from mmsdk.quant.types import Quantize, Scheme

__all__ = ["place", "precision", "quantise", "rounded", "scheme_of"]

_MATRICES = ("attention.qkv.weight", "attention.o.weight", "mlp.gate_up.weight", "mlp.down.weight")
_EMBEDDING, _HEAD = "embedding.weight", "head.weight"


def scheme_of(name: str, config: DecoderConfig, quantize: Quantize) -> Quantize:
    """How a tensor of a decoder is stored, by its name in the decoder's state. Raises ModelError for latent attention and for experts."""
    if quantize != "none" and not (isinstance(config.attention, Grouped) and isinstance(config.feed, Plain)):
        raise ModelError(f"quantize={quantize!r}: latent attention and mixtures of experts are not stored in fewer bits")
    if quantize == "none" or name.endswith(_MATRICES):
        return quantize
    return "int8" if name == (_EMBEDDING if config.tied else _HEAD) else "none"


def quantise(decoder: Decoder, quantize: Quantize) -> None:
    """Round every matrix that is still wide, in place, one at a time. Raises ModelError for weights that are not finite."""
    # By name alone: a list of the tensors would keep the wide ones in memory until the last is done.
    for name in [name for name, _ in decoder.named_parameters()]:
        scheme = scheme_of(name, decoder.config, quantize)
        if scheme != "none":
            place(decoder, name, rounded(decoder.get_parameter(name).detach(), scheme))


def rounded(weight: torch.Tensor, scheme: Scheme) -> Int4 | Int8:
    """A wide matrix [n, k] under a scheme."""
    return Int4.of(weight) if scheme == "int4" else Int8.of(weight)


def place(decoder: Decoder, name: str, matrix: Int4 | Int8) -> None:
    """Put a matrix where the decoder has a tensor of that name. Raises ModelError where it was made from numbers that are not finite."""
    if not matrix.finite:
        raise ModelError(f"the tensor {name!r} holds numbers that are not finite and cannot be quantised")
    if name == _EMBEDDING:
        assert isinstance(matrix, Int8), "an embedding is looked up by rows, which int4 does not do"
        table = Int8Linear(matrix, None)
        decoder.set_submodule("head", table)
        decoder.set_submodule("embedding", Int8Embedding(table, decoder.norm.weight.dtype))
        return
    where = name.removesuffix(".weight")
    bias = _bias(decoder.get_submodule(where))
    decoder.set_submodule(where, Int4Linear(matrix, bias) if isinstance(matrix, Int4) else Int8Linear(matrix, bias))


def precision(decoder: Decoder) -> str:
    """The dtype that a decoder computes in, behind its scheme where it has one: "bfloat16", "int4/bfloat16"."""
    dtype = str(decoder.norm.weight.dtype).removeprefix("torch.")
    kinds = {type(module) for module in decoder.layers.modules()}
    return f"int4/{dtype}" if Int4Linear in kinds else f"int8/{dtype}" if Int8Linear in kinds else dtype


def _bias(module: nn.Module) -> nn.Parameter | None:
    assert isinstance(module, nn.Linear), "a matrix is placed where a linear layer stands"
    return module.bias
