"""What may be read from inside a vision transformer while it runs: hidden states, keys, attention rows, norms.

Compressors score tokens by what the encoder attended to. A fused attention returns no weights, so the few rows that are asked for are
computed beside it, from the same queries and keys: one row for the class token, or the mean over all queries in slices. No matrix of
tokens by tokens is ever kept, and the model itself goes on running fused.

Letters: b rows of the batch, h heads, n tokens (the class token, where there is one, is token 0), e width of a head, s tokens of packed
rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.vision.packed import Rows
from mmsdk.vision.shorten import Groups

__all__ = ["NOTHING", "PackedRecorder", "Recorder", "TapValues", "Taps", "attention_mean", "attention_row"]

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
        _check(taps, layers)
        self._taps, self._layers = taps, layers
        self._read: dict[str, dict[int, tuple[Tensor, Groups]]] = {name: {} for name in ("hidden", "norms", "keys", "first", "mean")}

    def __call__(self, layer: int, query: Tensor, key: Tensor, hidden: Tensor, before: Groups, after: Groups) -> None:
        """Read what is asked of this layer from its queries and keys [b h n e] and the stream after it [b n d].

        `before` are the groups that the layer's attention saw, `after` those that it left.
        """
        taps, read = self._taps, self._read
        for asked in _here(taps.hidden, layer, self._layers):
            read["hidden"][asked] = hidden, after
        for asked in _here(taps.norms, layer, self._layers):
            read["norms"][asked] = torch.linalg.vector_norm(hidden, dim=-1, dtype=torch.float32), after
        for asked in _here(taps.keys, layer, self._layers):
            # The key is a view into the fused projection, which would live as long as it does.
            read["keys"][asked] = key.contiguous(), before
        for asked in _here(taps.first_rows, layer, self._layers):
            read["first"][asked] = attention_row(query[:, :, 0], key, before.bias), before
        for asked in _here(taps.mean_rows, layer, self._layers):
            read["mean"][asked] = attention_mean(query, key, before.bias), before

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


class PackedRecorder:
    """The same for packed rows from which tokens are removed: what was read is told of the tokens that are left in the end."""

    def __init__(self, taps: Taps, layers: int) -> None:
        _check(taps, layers)
        self._taps, self._layers = taps, layers
        self._read: dict[str, dict[int, tuple[Tensor, Rows]]] = {name: {} for name in ("hidden", "norms", "keys", "first", "mean")}

    def __call__(
        self, layer: int, query: Float[Tensor, "s h e"], key: Float[Tensor, "s h e"], hidden: Float[Tensor, "s d"], rows: Rows
    ) -> None:
        """Read what is asked of this layer from its queries and keys and the stream after it."""
        taps, layers = self._taps, self._layers
        for asked in _here(taps.hidden, layer, layers):
            self._read["hidden"][asked] = hidden, rows
        for asked in _here(taps.norms, layer, layers):
            self._read["norms"][asked] = torch.linalg.vector_norm(hidden, dim=-1, dtype=torch.float32), rows
        for asked in _here(taps.keys, layer, layers):
            self._read["keys"][asked] = key.contiguous(), rows
        for asked in _here(taps.first_rows, layer, layers):
            self._read["first"][asked] = _by_row(query, key, rows, lambda q, k: attention_row(q[:, :, 0], k)), rows
        for asked in _here(taps.mean_rows, layer, layers):
            self._read["mean"][asked] = _by_row(query, key, rows, attention_mean), rows

    def values(self, final: Rows) -> TapValues:
        """What was read, of the tokens of `final`; zeros behind the shorter rows."""

        def left(name: str) -> dict[int, Tensor]:
            # tokens are numbered by where they were at first, so that the survivors are found by their numbers
            return {
                layer: final.padded(x if rows is final else x[torch.searchsorted(rows.token, final.token)])
                for layer, (x, rows) in self._read[name].items()
            }

        heads = {name: {layer: x.transpose(1, 2) for layer, x in left(name).items()} for name in ("keys", "first", "mean")}
        return TapValues(left("hidden"), left("norms"), heads["keys"], heads["first"], heads["mean"])


def _by_row(query: Tensor, key: Tensor, rows: Rows, weights: Callable[[Tensor, Tensor], Tensor]) -> Float[Tensor, "s h"]:
    """Attention weights of each row, or of rows of one length together, by a function of queries and keys [b h n e]."""
    out = query.new_empty(query.shape[:2], dtype=torch.float32)
    for length, places in rows.buckets().items():
        for place in places:
            part = [x[place].unflatten(0, (-1, length)).transpose(1, 2) for x in (query, key)]
            out[place] = weights(*part).transpose(1, 2).flatten(0, 1)
    return out


def _check(taps: Taps, layers: int) -> None:
    asked = (*taps.hidden, *taps.norms, *taps.keys, *taps.first_rows, *taps.mean_rows)
    strays = [layer for layer in asked if not -layers <= layer < layers]
    if strays:
        raise ModelError(f"cannot read layers {strays} of {layers}; layers count from 0, or back from -1")


def _here(asked: tuple[int, ...], layer: int, layers: int) -> list[int]:
    return [i for i in asked if i % layers == layer]


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
