"""Decode steps and prompts in C++ (`mmsdk.kernels.cpu`), where this machine and the decoder allow it.

    hasten(decoder)     # after its weights are where they are to stay

A step of a few rows costs what reading the weights costs, and a prompt what its products cost, if nothing else comes on top: one call for
all layers where the cache is one piece of memory or pages, else two or three a layer. Everything else (gradients, other dtypes, mixtures of
experts, latent attention, adapters) goes the layers' own way. Both ways agree to within rounding; this one rounds less often.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import is_
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmsdk.attention.dense import Dense
from mmsdk.attention.mask import Everything, Masks
from mmsdk.decoder.asking import Asking
from mmsdk.decoder.large_pages import Room, settle
from mmsdk.decoder.linear import Linear
from mmsdk.decoder.mlp import GatedMLP
from mmsdk.decoder.norm import RMSNorm
from mmsdk.decoder.prompt import through
from mmsdk.decoder.rope import Rotation
from mmsdk.decoder.transformer import Decoder, Layer, SelfAttention, no_express
from mmsdk.kernels.cpu import layer as native
from mmsdk.kernels.cpu import prompt, rows
from mmsdk.kernels.cpu.library import library
from mmsdk.kernels.cpu.matrix import TILE, Matrix, wide
from mmsdk.kernels.cpu.rounded import QUERIES, Aged
from mmsdk.kv.attending import Attending
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.types import KVCache, LayerView
from mmsdk.quant.int4 import Int4Linear
from mmsdk.quant.int8 import Int8Linear

__all__ = ["NOTHING", "NativeRun", "NativeStep", "Parts", "Pass", "hasten"]


def hasten(decoder: Decoder, room: Room | None = None) -> None:
    """Let decode steps and prompts go through C++, which is compiled at the first time. Nothing happens where that cannot be.

    The weights move to large pages, unless they were read into such a room, or the decoder was made from one whose weights moved.
    """
    computes = decoder.norm.weight
    if computes.dtype == torch.bfloat16 and computes.device.type == "cpu" and library().functions is not None:
        if decoder.express is no_express:
            settle(decoder, room)
        for layer in decoder.layers:
            if isinstance(layer, Layer):
                layer.shortcut = NativeStep(layer)
        decoder.express = NativeRun(decoder)


@dataclass(frozen=True, slots=True)
class Parts:
    """Every module and tensor of a layer, or of a whole decoder: the modules' own dictionaries, a name in each, and what stood there.

    Of tensors also where their numbers were. Asked at every step, of some hundred of them, so that no line of Python runs for each.
    """

    owners: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    ones: tuple[object, ...]
    tensors: tuple[Tensor, ...]
    places: list[int]

    @staticmethod
    def of(layer: nn.Module) -> "Parts":
        """As it is now."""
        owners: list[dict[str, Any]] = [part for one in layer.modules() for part in (one._modules, one._parameters, one._buffers)]
        held = [(owner, name, one) for owner in owners for name, one in owner.items()]
        tensors = tuple(one for _, _, one in held if isinstance(one, Tensor))
        whose, names, ones = zip(*held, strict=True)
        return Parts(whose, names, ones, tensors, [one.data_ptr() for one in tensors])

    @property
    def same(self) -> bool:
        """Whether each entry is still the object, in the memory, that it was."""
        return all(map(is_, map(dict.get, self.owners, self.names), self.ones)) and list(map(Tensor.data_ptr, self.tensors)) == self.places


NOTHING = Parts((), (), (), (), [])


class NativeStep:
    """A layer's decode step. It holds the weights that it was made from, and is made anew where the layer has others by now.

    Hooks of modules within the layer are not called.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        # In one piece, so that no thread sees the one without the other.
        self._made: tuple[Parts, native.Layer | None] = NOTHING, None

    def __reduce__(self) -> tuple[type["NativeStep"], tuple[Layer]]:
        """A copy points to its own layer's weights."""
        return NativeStep, (self.layer,)

    @property
    def made(self) -> native.Layer | None:
        """The layer as the library takes it; none where something in it is not what the library knows."""
        parts, made = self._made
        if parts is NOTHING or not parts.same:
            # The parts first: what changes in between is noticed at the next step.
            parts, made = Parts.of(self.layer), _native(self.layer)
            self._made = parts, made
        return made

    def takes(self, x: Float[Tensor, "b s w"]) -> bool:
        """Whether these are a few single tokens, or a prompt's, that need no gradients, in front of a layer that has such a step."""
        if _takes(x):
            return self.made is not None
        return rows.here(x) and prompt.ready() and (made := self.made) is not None and prompt.fits(made)

    def __call__(
        self, x: Float[Tensor, "b s w"], rotation: Rotation, cache: KVCache, layer: int, masks: Masks, last: int = 0
    ) -> Float[Tensor, "b _ w"]:
        """As the layer itself."""
        made, attention = self.made, self.layer.attention
        assert made is not None and isinstance(attention, SelfAttention), "asked whether it takes x"
        if not _takes(x):
            return through(made, attention, x, rotation, cache, layer, masks, last)
        heads, kv_heads = attention.heads, attention.kv_heads
        qkv = native.project(made, x[:, 0], *_turns(rotation, len(x), attention.head_dim // 2))
        query, key, value = qkv.unsqueeze(2).split((heads, kv_heads, kv_heads), dim=1)
        if isinstance(cache, Attending):
            seen = cache.attend(layer, query, key, value, Asking(attention.core, masks, rotation)).contiguous()
            return native.finish(made, x[:, 0], seen.flatten(1))[:, None]
        view = cache.append(layer, key, value)
        mask = masks.of(view)
        plain = type(attention.core) is Dense and type(mask) is Everything
        if plain and isinstance(view, LayerView) and native.attends(view.keys, view.values):
            seen = native.attend(made, qkv[:, :heads], view.keys, view.values)
        else:
            seen = attention.core(query, view, mask).contiguous()
        return native.finish(made, x[:, 0], seen.flatten(1))[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Some tokens on their way, for which the cache has made room; `last` as in `Decoder.run`."""

    x: Float[Tensor, "b s w"]
    rotation: Rotation
    cache: KVCache
    last: int = 0


class NativeRun:
    """A decode step, or a prompt whose rows are all as long, through several layers whose tokens are read where they lie."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def __call__(
        self, x: Float[Tensor, "b s w"], rotation: Rotation, cache: KVCache, layers: range, last: int
    ) -> tuple[Float[Tensor, "b _ w"], ...]:
        """See `Express`; the cache has made room for the tokens."""
        for step in self._step(x, rotation, cache, layers):
            made = self._made(layers)
            return tuple(part[:, None] for part in native.run(made, step.x, step.cos, step.sin, step.place)) if made else ()
        for one in self._prompt(x, rotation, cache, layers, last):
            made = self._made(layers)
            return prompt.read(made, one.x, one.cos, one.sin, one.memory, last) if made and prompt.fits(made[0]) else ()
        return ()

    def beside(self, passes: Sequence[Pass], layers: range) -> tuple[Float[Tensor, "_ _ w"], ...]:
        """The streams behind these layers of passes that go through them side by side, of which one at most is a step.

        Nothing where it does not take each of them; of every cache the same holds as when it is called.
        """
        steps = [self._step(one.x, one.rotation, one.cache, layers) for one in passes]
        reads = [
            () if step else self._prompt(one.x, one.rotation, one.cache, layers, one.last) for one, step in zip(passes, steps, strict=True)
        ]
        made = self._made(layers) if all(step or read for step, read in zip(steps, reads, strict=True)) else []
        if not made or not prompt.fits(made[0]):
            return ()
        told, spoken = prompt.read_beside(made, [one for read in reads for one in read], [one for step in steps for one in step])
        streams, said = iter(told), iter(spoken)
        return tuple(next(said)[0][:, None] if step else next(streams)[0] for step in steps)

    def _step(self, x: Float[Tensor, "b s w"], rotation: Rotation, cache: KVCache, layers: range) -> tuple[native.Step, ...]:
        """A step of a few rows, if it is one, and their tokens are read where they lie."""
        if not _takes(x) or not isinstance(cache, DenseCache | PagedCache):
            return ()
        found = cache.place(layers)
        if not found or not native.attends(found[0].keys[0], found[0].values[0]) or not self._reads(found[0].aged):
            return ()
        return (native.Step(x[:, 0], *_turns(rotation, len(x), self.decoder.config.head_dim // 2), found[0]),)

    def _prompt(self, x: Float[Tensor, "b s w"], rotation: Rotation, cache: KVCache, layers: range, last: int) -> tuple[prompt.Read, ...]:
        """A prompt, if it is one, whose tokens lie as C++ reads them."""
        if not rows.here(x) or x.shape[1] == 1 or not isinstance(cache, DenseCache | PagedCache):
            return ()
        found = cache.memory(layers, x.shape[1])
        if not found or not prompt.reads(found[0]):
            return ()
        half = self.decoder.config.head_dim // 2
        cos, sin = (part.expand(len(x), 1, x.shape[1], half).reshape(-1, half).bfloat16() for part in (rotation.cos, rotation.sin))
        return (prompt.Read(x, cos, sin, found[0], last),)

    def _made(self, layers: range) -> list[native.Layer]:
        """All of these layers as the library takes them, or none where it does not take each."""
        # not as a slice, which is a new module of all of them
        among = islice(self.decoder.layers, layers.start, layers.stop)
        steps = [layer.shortcut for layer in among if isinstance(layer, Layer)]
        made = [one for step in steps if isinstance(step, NativeStep) and (one := step.made) is not None and _plain(step.layer)]
        return made if len(made) == len(layers) else []

    def _reads(self, aged: Aged | None) -> bool:
        """Whether what is kept in fewer bits, if anything, has few queries a head."""
        config = self.decoder.config
        return aged is None or config.heads // config.kv_heads <= QUERIES


def _takes(x: Float[Tensor, "b s w"]) -> bool:
    few = x.shape[1] == 1 and x.shape[0] <= native.FEW and x.dtype == torch.bfloat16 and x.device.type == "cpu"
    return few and not torch.is_grad_enabled() and x.is_contiguous()


def _plain(layer: Layer) -> bool:
    attention, hooked = layer._modules["attention"], layer._forward_hooks or layer._forward_pre_hooks
    return isinstance(attention, SelfAttention) and type(attention.core) is Dense and not hooked


def _turns(rotation: Rotation, rows: int, half: int) -> tuple[Float[Tensor, "m f"], Float[Tensor, "m f"]]:
    cos, sin = (part.expand(rows, 1, 1, half).reshape(rows, -1).bfloat16().contiguous() for part in (rotation.cos, rotation.sin))
    return cos, sin


def _native(layer: Layer) -> native.Layer | None:
    attention, mlp = layer.attention, layer.mlp
    if type(attention) is not SelfAttention or type(mlp) is not GatedMLP or not isinstance(layer.post1, nn.Identity):
        return None
    if any(tensor.device.type != "cpu" for tensor in (*layer.parameters(), *layer.buffers())):
        return None
    norms = [layer.norm1, layer.norm2, *((attention.q_norm, attention.k_norm) if attention.normed else ())]
    weights = [norm.weight.detach() for norm in norms if isinstance(norm, RMSNorm) and not norm.offset]
    if len(weights) < len(norms) or any(weight.dtype != torch.bfloat16 for weight in weights) or attention.head_dim % 2:
        return None
    # A thread takes the same rows of gate and up, which in int4 are sixteen together.
    both: nn.Module = mlp.gate_up
    if isinstance(both, Int4Linear) and both.outputs // 2 % TILE:
        return None
    matrices = [_matrix(module) for module in (attention.qkv, attention.o, both, mlp.down)]
    qkv, o, gate_up, down = matrices
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    heads = attention.heads, attention.kv_heads, attention.head_dim
    ends, eps, scale = (weights[0], weights[1]), layer.norm1.eps, float(attention.query_scale)
    return native.Layer.of((qkv, o, gate_up, down), ends, tuple(weights[2:]), heads, eps, scale, mlp.kind == "gelu_tanh")


def _matrix(module: nn.Module) -> Matrix | None:
    if isinstance(module, Int4Linear | Int8Linear):
        return module.native()
    if type(module) is not Linear or module.weight.dtype != torch.bfloat16 or not module.weight.is_contiguous():
        return None
    return wide(module.weight.detach(), None if module.bias is None else module.bias.detach())
