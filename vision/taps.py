"""What may be read from inside a vision transformer while it runs: hidden states, keys, attention rows, norms.

Compressors score tokens by what the encoder attended to. A fused attention returns no weights, so the few rows that are asked for are
computed beside it, from the same queries and keys: one row for the class token, or the mean over all queries in slices. No matrix of
tokens by tokens is ever kept, and the model itself goes on running fused.

Letters: b rows of the batch, h heads, n tokens (the class token, where there is one, is token 0), e width of a head.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.vision.shorten import Groups

__all__ = ["NOTHING", "Recorder", "TapValues", "Taps", "attention_mean", "attention_row"]

# Entries of a slice of the attention matrix that may exist at one time: 8 MiB in float32.
_SLICE = 2**21


@dataclass(frozen=True, slots=True)
class Taps:
    """Which layers to read, counted from 0; -1 is the last. Empty means nothing is read.

    `hidden`: the residual stream after that layer. `norms`: its Euclidean norm per token. `keys`: the keys of that layer.
    `first_rows`: the attention of token 0 (the class token) to all. `mean_rows`: the attention each token receives, mean over queries.
    """

    hidden: tuple[int, ...] = ()
    norms: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    first_rows: tuple[int, ...] = ()
    mean_rows: tuple[int, ...] = ()


NOTHING = Taps()


@dataclass(frozen=True, slots=True)
class TapValues:
    """What was read, by the layer as it was asked for. Rows and norms are float32; a row sums to 1 over all n tokens.

    Where the transformer was shortened, all speak of its final tokens: means over what became one, weighted by the patches of each.
    """

    hidden: Mapping[int, Float[Tensor, "b n d"]]
    norms: Mapping[int, Float[Tensor, "b n"]]
    keys: Mapping[int, Float[Tensor, "b h n e"]]
    first_rows: Mapping[int, Float[Tensor, "b h n"]]
    mean_rows: Mapping[int, Float[Tensor, "b h n"]]


class Recorder:
    """Fills `TapValues` layer by layer while a model of `layers` layers runs."""

    def __init__(self, taps: Taps, layers: int) -> None:
        asked = (*taps.hidden, *taps.norms, *taps.keys, *taps.first_rows, *taps.mean_rows)
        strays = [layer for layer in asked if not -layers <= layer < layers]
        if strays:
            raise ModelError(f"cannot read layers {strays} of {layers}; layers count from 0, or back from -1")
        self._taps, self._layers = taps, layers
        self._read: dict[str, dict[int, tuple[Tensor, Groups]]] = {name: {} for name in ("hidden", "norms", "keys", "first", "mean")}

    def __call__(self, layer: int, query: Tensor, key: Tensor, hidden: Tensor, before: Groups, after: Groups) -> None:
        """Read what is asked of this layer from its queries and keys [b h n e] and the stream after it [b n d].

        `before` are the groups that the layer's attention saw, `after` those that it left.
        """
        taps, read = self._taps, self._read
        for asked in self._here(taps.hidden, layer):
            read["hidden"][asked] = hidden, after
        for asked in self._here(taps.norms, layer):
            read["norms"][asked] = torch.linalg.vector_norm(hidden, dim=-1, dtype=torch.float32), after
        for asked in self._here(taps.keys, layer):
            # The key is a view into the fused projection, which would live as long as it does.
            read["keys"][asked] = key.contiguous(), before
        for asked in self._here(taps.first_rows, layer):
            read["first"][asked] = attention_row(query[:, :, 0], key, before.bias), before
        for asked in self._here(taps.mean_rows, layer):
            read["mean"][asked] = attention_mean(query, key, before.bias), before

    def _here(self, asked: tuple[int, ...], layer: int) -> list[int]:
        return [i for i in asked if i % self._layers == layer]

    def values(self, final: Groups) -> TapValues:
        """What was read, told in the tokens of `final`."""
        read = self._read
        return TapValues(
            hidden={layer: groups.carry(x, final) for layer, (x, groups) in read["hidden"].items()},
            norms={layer: groups.carry(x[..., None], final)[..., 0] for layer, (x, groups) in read["norms"].items()},
            keys={layer: _carried_heads(x, groups, final) for layer, (x, groups) in read["keys"].items()},
            first_rows={layer: groups.carry(x.transpose(1, 2), final).transpose(1, 2) for layer, (x, groups) in read["first"].items()},
            mean_rows={layer: groups.carry(x.transpose(1, 2), final).transpose(1, 2) for layer, (x, groups) in read["mean"].items()},
        )


def _carried_heads(x: Float[Tensor, "b h n e"], groups: Groups, final: Groups) -> Float[Tensor, "b h m e"]:
    if groups is final:
        return x
    heads: Tensor = groups.carry(x.transpose(1, 2).flatten(2), final).unflatten(2, (x.shape[1], -1)).transpose(1, 2)
    return heads


def attention_row(
    query: Float[Tensor, "b h e"], key: Float[Tensor, "b h n e"], bias: Float[Tensor, "b n"] | None = None
) -> Float[Tensor, "b h n"]:
    """The attention weights of one query over all keys, in float32: softmax(q k / sqrt(e) + bias)."""
    scores = torch.einsum("bhe,bhne->bhn", query.float() * query.shape[-1] ** -0.5, key.float())
    return (scores if bias is None else scores + bias[:, None]).softmax(dim=-1)


def attention_mean(
    query: Float[Tensor, "b h s e"], key: Float[Tensor, "b h n e"], bias: Float[Tensor, "b n"] | None = None
) -> Float[Tensor, "b h n"]:
    """The mean over all queries of their attention weights, in float32, in slices of queries that fit a few MiB."""
    b, h, s, e = query.shape
    key_t = key.float().transpose(2, 3)
    total = query.new_zeros(b, h, key.shape[2], dtype=torch.float32)
    for part in query.split(max(1, _SLICE // (b * h * key.shape[2])), dim=2):
        scores = torch.matmul(part.float() * e**-0.5, key_t)
        total += (scores if bias is None else scores + bias[:, None, None]).softmax(dim=-1).sum(dim=2)
    return total / s
