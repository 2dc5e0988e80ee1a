"""The many tokens of a prompt through a layer in C++ (`mmsdk.kernels.cpu.prompt`), where this machine and the layer allow it.

Products read the weights as they lie for decode steps, whether bfloat16, int8 or int4. The cache and the layer's own attention stand in
between, so that every cache, mask and way of attention goes with it: pages, prefixes, padding, windows, policies.
"""

from jaxtyping import Float
from torch import Tensor

from mmsdk.attention.mask import Masks
from mmsdk.decoder.asking import Asking
from mmsdk.decoder.rope import Rotation
from mmsdk.decoder.transformer import SelfAttention
from mmsdk.kernels.cpu import layer as native
from mmsdk.kernels.cpu import prompt
from mmsdk.kv.attending import Attending
from mmsdk.kv.types import KVCache

__all__ = ["through"]


def through(
    made: native.Layer,
    attention: SelfAttention,
    x: Float[Tensor, "b s w"],
    rotation: Rotation,
    cache: KVCache,
    layer: int,
    masks: Masks,
    last: int,
) -> Float[Tensor, "b _ w"]:
    """The stream after the layer, of the `last` so many tokens or, with 0, of all.

    `prompt.fits` must hold, and x be bfloat16 without gradients.
    """
    (b, s, width), half = x.shape, attention.head_dim // 2
    cos, sin = (part.expand(b, 1, s, half).reshape(-1, half).bfloat16().contiguous() for part in (rotation.cos, rotation.sin))
    flat = x.reshape(-1, width)
    qkv = prompt.project(made, flat, cos, sin).unflatten(0, (b, s)).transpose(1, 2)
    query, key, value = qkv.split((attention.heads, attention.kv_heads, attention.kv_heads), dim=1)
    if isinstance(cache, Attending):
        seen = cache.attend(layer, query, key, value, Asking(attention.core, masks, rotation))
    else:
        view = cache.append(layer, key, value)
        seen = attention.core(query, view, masks.of(view))
    ends, seen = (part[:, -last:].reshape(-1, part.shape[-1]).contiguous() for part in (x, seen.transpose(1, 2).flatten(2)))
    # where only some are asked for, they may be as few as those of a decode step
    finish = native.finish if last and len(ends) <= native.FEW else prompt.finish
    return finish(made, ends, seen).view(b, -1, width)
