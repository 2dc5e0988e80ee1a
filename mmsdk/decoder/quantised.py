"""A decoder whose matrices are stored in fewer bits.

| tensor | int4 | int8 |
| --- | --- | --- |
| the matrices of every layer | int4 | int8 |
| the embedding and the head that is tied to it | int8, one for both | int8, one for both |
| a head of its own | int8 | int8 |
| an embedding that is not tied | as it is | as it is |
| norms and biases | as they are | as they are |
| what chooses: routers, indexers, and what makes compressed entries | as they are | as they are |
| W_UK and W_UV of latent attention, the key of shared-head attention, its first output matrix | as they are | as they are |

Each routed expert is a matrix of its own.

A head's errors go straight into the scores, with no later layer to even them out, so that it is not stored in four bits. An embedding is
read a row a token, so that fewer bits gain no time; where the head makes it worth it, both read the same bytes. Norms and biases are a
thousandth of the whole.
"""

from collections.abc import Sequence

import torch
from torch import nn

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.moe import Experts
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError
from mmsdk.quant.int4 import Int4, Int4Linear
from mmsdk.quant.int8 import Int8, Int8Embedding, Int8Linear
from mmsdk.quant.types import Quantize, Scheme

__all__ = ["parts_of", "place", "precision", "quantise", "rounded", "scheme_of"]

_EXPERTS = ("mlp.experts.gate_up", "mlp.experts.down")
_MATRICES = (
    *("attention.qkv.weight", "attention.o.weight", "mlp.gate_up.weight", "mlp.down.weight"),
    # of latent and of shared-head attention, and of mixtures
    *("attention.q_down.weight", "attention.q_up.weight", "attention.kv_down.weight", "attention.o_up.weight"),
    *("mlp.shared.gate_up.weight", "mlp.shared.down.weight", *_EXPERTS),
)
_EMBEDDING, _HEAD = "embedding.weight", "head.weight"


def scheme_of(name: str, config: DecoderConfig, quantize: Quantize) -> Quantize:
    """How a tensor of a decoder is stored, by its name in the decoder's state."""
    if quantize == "none" or name.endswith(_MATRICES):
        return quantize
    return "int8" if name == (_EMBEDDING if config.tied else _HEAD) else "none"


def quantise(decoder: Decoder, quantize: Quantize) -> None:
    """Round every matrix that is still wide, in place, one at a time. Raises ModelError for weights that are not finite."""
    # By name alone: a list of the tensors would keep the wide ones in memory until the last is done.
    for name in [name for name, _ in decoder.named_parameters()]:
        scheme = scheme_of(name, decoder.config, quantize)
        if scheme != "none":
            place(decoder, name, [rounded(part, scheme) for part in decoder.get_parameter(name).detach().chunk(parts_of(name, decoder))])


def parts_of(name: str, decoder: Decoder) -> int:
    """How many matrices below one another a tensor is: one for each expert."""
    return _experts(decoder, name).count if name.endswith(_EXPERTS) else 1


def rounded(weight: torch.Tensor, scheme: Scheme) -> Int4 | Int8:
    """A wide matrix [n, k] under a scheme."""
    return Int4.of(weight) if scheme == "int4" else Int8.of(weight)


def place(decoder: Decoder, name: str, matrices: Sequence[Int4 | Int8]) -> None:
    """Put a matrix, or those of all experts, where the decoder has a tensor of that name.

    Raises ModelError where one was made from numbers that are not finite.
    """
    if not all(matrix.finite for matrix in matrices):
        raise ModelError(f"the tensor {name!r} holds numbers that are not finite and cannot be quantised")
    if name.endswith(_EXPERTS):
        _experts(decoder, name).hold(name.rpartition(".")[2], [_linear(matrix, None) for matrix in matrices])
        return
    (matrix,) = matrices
    if name == _EMBEDDING:
        assert isinstance(matrix, Int8), "an embedding is looked up by rows, which int4 does not do"
        table = Int8Linear(matrix, None)
        decoder.set_submodule("head", table)
        decoder.set_submodule("embedding", Int8Embedding(table, decoder.dtype))
        return
    where = name.removesuffix(".weight")
    decoder.set_submodule(where, _linear(matrix, _bias(decoder.get_submodule(where))))


def precision(decoder: Decoder) -> str:
    """The dtype that a decoder computes in, behind its scheme where it has one: "bfloat16", "int4/bfloat16"."""
    dtype = str(decoder.dtype).removeprefix("torch.")
    kinds = {type(module) for module in decoder.layers.modules()}
    return f"int4/{dtype}" if Int4Linear in kinds else f"int8/{dtype}" if Int8Linear in kinds else dtype


def _linear(matrix: Int4 | Int8, bias: nn.Parameter | None) -> Int4Linear | Int8Linear:
    return Int4Linear(matrix, bias) if isinstance(matrix, Int4) else Int8Linear(matrix, bias)


def _experts(decoder: Decoder, name: str) -> Experts:
    module = decoder.get_submodule(name.rpartition(".")[0])
    assert isinstance(module, Experts), "matrices of experts are those of a mixture"
    return module


def _bias(module: nn.Module) -> nn.Parameter | None:
    assert isinstance(module, nn.Linear), "a matrix is placed where a linear layer stands"
    return module.bias
