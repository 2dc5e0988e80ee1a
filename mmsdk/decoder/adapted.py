"""Low-rank updates of a decoder's matrices, for each row of a batch its own.

    LoRA    W x + s B A x                                   s = alpha / r       (Hu et al., arXiv 2106.09685)
    rsLoRA  the same                                        s = alpha / sqrt(r) (Kalajdzievski, arXiv 2312.03732)
    DoRA    m / |W + s B A| * (W x + s B A x), row by row   m is learned        (Liu et al., arXiv 2402.09353)

W may be in fewer bits (QLoRA, arXiv 2305.14314). It is read once for all rows of a batch, whatever adapters they have; the thin products
alone are each adapter's own (S-LoRA, arXiv 2311.03285). Of several adapters of one row each works on what the one before it left, as in
PEFT: for LoRA that is their sum. A decoder without adapters is not touched: `wear` makes another one around the same weights.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mmsdk.decoder.linear import product
from mmsdk.decoder.native import hasten
from mmsdk.decoder.transformer import Decoder, Layer, NoShortcut, no_express
from mmsdk.errors import ModelError
from mmsdk.quant.int4 import Int4Linear
from mmsdk.quant.int8 import Int8Linear

__all__ = ["AdaptedDecoder", "AdaptedLinear", "Adapter", "Stack", "Update", "merged", "numbers", "outputs", "updated", "wear"]

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Update:
    """What an adapter adds to a matrix [o i], `up` times `down`, and for DoRA the `factor` that each row is multiplied by behind it."""

    down: Float[Tensor, "r i"]
    up: Float[Tensor, "o r"]
    factor: tuple[Float[Tensor, " o"], ...] = ()

    def __call__(
        self, x: Float[Tensor, "*m i"], out: Float[Tensor, "*m o"], weight: float, bias: tuple[Float[Tensor, " o"], ...]
    ) -> Float[Tensor, "*m o"]:
        """From `out`, which the matrix makes of x, what the updated one makes of it. The bias is part of `out` and not multiplied."""
        added = product(product(x, self.down), self.up)
        out = out + (added if weight == 1 else weight * added)
        for factor in self.factor:
            for own in bias:
                out = out - own
            out = out * factor
            for own in bias:
                out = out + own
        return out

    def merged(self, matrix: Float[Tensor, "o i"], weight: float) -> Float[Tensor, "o i"]:
        """The updated matrix, in float32."""
        wide = torch.addmm(matrix.float(), self.up.float(), self.down.float(), alpha=weight)
        for factor in self.factor:
            wide = wide * factor.float()[:, None]
        return wide


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Updates by the name of the module that they change ("layers.0.attention.qkv"). `key` is of this one alone, of all ever loaded.

    `sight` are those of what sees ("tower.blocks.0.qkv", "projector.linear_1").
    """

    name: str
    key: bytes
    updates: Mapping[str, Update]
    sight: Mapping[str, Update] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, object]) -> "Adapter":
        """Itself: nothing changes an adapter, and what its key is of has to stay this one."""
        return self


Stack = tuple[tuple[Adapter, float], ...]
"""The adapters of a row in their order, each with its weight; none is the model as it is."""


@dataclass(frozen=True, slots=True)
class Group:
    """Some `rows` of a batch, all where there are none given, and what changes a matrix for them."""

    rows: tuple[Int[Tensor, " k"], ...]
    updates: tuple[tuple[Update, float], ...]


class AdaptedLinear(nn.Module):
    """A linear layer whose matrix is updated in another way for each group of rows."""

    def __init__(self, base: nn.Module, groups: Sequence[Group]) -> None:
        super().__init__()
        self.base = base
        self.groups = tuple(groups)
        own = _linear(base).bias
        self.shift: tuple[Tensor, ...] = () if own is None else (own,)

    def forward(self, x: Float[Tensor, "b *s i"]) -> Float[Tensor, "b *s o"]:
        """Width i in, width o out, row by row of the batch."""
        out: Tensor = self.base(x)
        for group in self.groups:
            if not group.rows:
                out = self._updated(group, x, out)
            for rows in group.rows:
                # nobody else holds what the product gave
                out.index_copy_(0, rows, self._updated(group, x[rows], out[rows]))
        return out

    def _updated(self, group: Group, x: Float[Tensor, "k *s i"], out: Float[Tensor, "k *s o"]) -> Float[Tensor, "k *s o"]:
        for update, weight in group.updates:
            out = update(x, out, weight, self.shift)
        return out


class AdaptedDecoder(Decoder):
    """A decoder on the weights of another, whose rows have these stacks of adapters; made by `wear`."""

    def __init__(self, plain: Decoder, stacks: Sequence[Stack]) -> None:
        nn.Module.__init__(self)
        parts = {name: AdaptedLinear(plain.get_submodule(name), _groups(plain, name, stacks)) for name in _changed(stacks)}
        vars(self).update(vars(_rebuilt(plain, parts)))
        # in a tuple, where it is no part of this one
        self.around = (plain, tuple(stacks))

    def among(self, rows: Sequence[int]) -> Decoder:
        """See `Decoder.among`."""
        plain, stacks = self.around
        return wear(plain, [stacks[row] for row in rows])


def wear(plain: Decoder, stacks: Sequence[Stack]) -> Decoder:
    """The decoder for a batch whose rows have these adapters; `plain` itself where none has any. Takes a millisecond or two."""
    return AdaptedDecoder(plain, stacks) if any(stacks) else plain


def merged(plain: Decoder, stack: Stack) -> Decoder:
    """A decoder with the updates in its weights: the changed matrices are new, all else is shared, and `plain` stays as it is.

    Raises ModelError where a matrix is stored in fewer bits: the update would be lost in rounding.
    """
    other = updated(plain, [(adapter.updates, weight) for adapter, weight in stack])
    hasten(other)
    return other


def updated(plain: Module, updates: Sequence[tuple[Mapping[str, Update], float]]) -> Module:
    """A module with updates of its matrices in them, one after another; all else is shared. Raises ModelError as `merged` does."""
    parts = {}
    for name in dict.fromkeys(name for named, _ in updates for name in named):
        base = _linear(plain.get_submodule(name))
        if not isinstance(base, nn.Linear):
            raise ModelError("adapters cannot be merged into matrices in fewer bits; use them as they are, or load with quantize='none'")
        matrix = base.weight.detach()
        for named, weight in updates:
            if name in named:
                matrix = named[name].merged(matrix, weight)
        parts[name] = copy.copy(base)
        parts[name]._parameters = {**base._parameters, "weight": nn.Parameter(matrix.to(base.weight.dtype), requires_grad=False)}
    return _rebuilt(plain, parts)


def numbers(module: nn.Module) -> Float[Tensor, "o i"]:
    """The matrix of a linear layer in float32, however it is stored."""
    base = _linear(module)
    if isinstance(base, Int4Linear):
        return base.layout.written_out(torch.float32)
    return base.rows(slice(None), torch.float32) if isinstance(base, Int8Linear) else base.weight.detach().float()


def outputs(module: nn.Module) -> int:
    """The rows of the matrix of a linear layer, without reading it."""
    base = _linear(module)
    if isinstance(base, Int4Linear):
        return base.outputs
    return len(base.codes if isinstance(base, Int8Linear) else base.weight)


def _linear(module: nn.Module) -> nn.Linear | Int4Linear | Int8Linear:
    assert isinstance(module, nn.Linear | Int4Linear | Int8Linear), "an adapter changes linear layers"
    return module


def _changed(stacks: Sequence[Stack]) -> list[str]:
    """The modules that any of the adapters changes."""
    return list(dict.fromkeys(name for stack in stacks for adapter, _ in stack for name in adapter.updates))


def _groups(plain: Decoder, name: str, stacks: Sequence[Stack]) -> list[Group]:
    """The rows by what changes one matrix for them."""
    places = dict[Stack, list[int]]()
    for row, stack in enumerate(stacks):
        places.setdefault(tuple(one for one in stack if name in one[0].updates), []).append(row)
    device = plain.norm.weight.device
    return [
        Group(
            () if len(rows) == len(stacks) else (torch.tensor(rows, device=device),),
            tuple((adapter.updates[name], weight) for adapter, weight in stack),
        )
        for stack, rows in places.items()
        if stack
    ]


def _rebuilt(module: Module, parts: Mapping[str, nn.Module]) -> Module:
    """The module with these parts, by their names within it, in the places of its own; all else is shared."""
    inside = dict[str, dict[str, nn.Module]]()
    for name, part in parts.items():
        head, _, rest = name.partition(".")
        inside.setdefault(head, {})[rest] = part
    twin = copy.copy(module)
    own = {head: deeper[""] if "" in deeper else _rebuilt(module.get_submodule(head), deeper) for head, deeper in inside.items()}
    twin._modules = {**module._modules, **own}
    # ways around the layers know their matrices as they were
    if isinstance(twin, Layer):
        twin.shortcut = NoShortcut()
    if isinstance(twin, Decoder):
        twin.express = no_express
    return twin
