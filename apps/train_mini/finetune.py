"""Stage 1: teach the language model to read the visual tokens, by low-rank adapters and the projector, on packed question-answer pairs.

The rows are those of `packing`. Their shapes are static, which lets torch.compile fuse what lies between the matrix products.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.apps.train_mini.packing import Batch
from mmsdk.decoder.linear import Linear
from mmsdk.decoder.mlp import GatedMLP
from mmsdk.decoder.transformer import Decoder, Layer, SelfAttention
from mmsdk.errors import InputError
from mmsdk.models.mini.adapter import Update

__all__ = ["Adapters", "Recipe", "forward", "layer_forward", "loss_of", "through"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The knobs of stage 1; the same values and seed give the same batches.

    The first `scene_steps` show still scenes alone, until the model has found its eyes; the last `full_steps` show every visual token, with
    `room` tokens of questions after them (`clip_room` for clips, of which there is less to ask).
    The projector learns slowly, or the noise of the first steps undoes its grounding.
    """

    steps: int = 4500
    scene_steps: int = 150
    full_steps: int = 500
    rows: int = 4
    length: int = 288
    room: int = 160
    clip_room: int = 96
    rank: int = 32
    scale: float = 2.0
    lr: float = 8e-4
    projector_lr: float = 5e-5
    warmup: int = 20
    blind: float = 0.04
    seed: int = 0


class Adapters(nn.Module):
    """Low-rank updates of every linear layer of the decoder: W + scale * b @ a, kept in fp32 beside it, the same ones on every device."""

    def __init__(self, decoder: Decoder, rank: int, scale: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.scale = scale
        self.names = ("qkv", "o", "gate_up", "down")
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        for layer in decoder.layers:
            for linear in _linears(layer):
                out, inner = linear.weight.shape
                bound = 1 / math.sqrt(inner)
                first = (torch.rand(rank, inner, generator=generator) * 2 - 1) * bound
                self.a.append(nn.Parameter(first.to(linear.weight.device)))
                self.b.append(nn.Parameter(torch.zeros(out, rank, device=linear.weight.device)))

    def tensors(self) -> dict[str, Tensor]:
        """`lora.{layer}.{name}.{a|b}`, the scale folded into b."""
        found = {}
        for i, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            key = f"lora.{i // 4}.{self.names[i % 4]}"
            found[f"{key}.a"], found[f"{key}.b"] = a.detach(), b.detach() * self.scale
        return found

    @torch.no_grad()
    def go_on(self, updates: Mapping[tuple[int, str], Update]) -> None:
        """Begin at the updates of a file. Raises InputError where they are not of these matrices, or of another rank."""
        places = [(i // 4, self.names[i % 4]) for i in range(len(self.a))]
        shapes = {place: (a.shape, b.shape) for place, a, b in zip(places, self.a, self.b, strict=True)}
        if {place: (update.a.shape, update.b.shape) for place, update in updates.items()} != shapes:
            raise InputError(f"its updates are not those of {len(places)} matrices by rank {len(self.a[0])}", item="--start")
        for place, a, b in zip(places, self.a, self.b, strict=True):
            a.copy_(updates[place].a)
            b.copy_(updates[place].b.float() / self.scale)

    def cast(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """(a, scale * b) of every layer in the compute dtype, differentiable."""
        return [(a.to(dtype), (b * self.scale).to(dtype)) for a, b in zip(self.a, self.b, strict=True)]


def _linears(layer: nn.Module) -> tuple[Linear, Linear, Linear, Linear]:
    """The four products of a llama layer, in the order in which it makes them."""
    assert isinstance(layer, Layer) and isinstance(layer.attention, SelfAttention) and isinstance(layer.mlp, GatedMLP)
    return layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down


class _Adapted(torch.autograd.Function):
    """x W^T + x a^T b^T without a gradient for W; everything [n, d]."""

    @staticmethod
    def forward(ctx, x, weight, a, b):  # type: ignore[no-untyped-def]
        low = x @ a.T
        y = x @ weight.T
        y.addmm_(low, b.T)
        ctx.save_for_backward(x, weight, a, b, low)
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, weight, a, b, low = ctx.saved_tensors
        down = dy @ b
        dx = dy @ weight
        dx.addmm_(down, a)
        return dx, None, down.T @ x, dy.T @ low


_adapted: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _Adapted.apply


def _product(x: Tensor, weight: Tensor, pair: tuple[Tensor, ...]) -> Tensor:
    """x W^T, with the adapter (a, b) of the product where there is one."""
    return _adapted(x, weight, *pair) if pair else x @ weight.T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def layer_forward(
    x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, weights: tuple[Tensor, ...], adapters: tuple[Tensor, ...],
    heads: tuple[int, int, int], eps: float,
) -> Tensor:  # fmt: skip
    """One llama layer, written for training: explicit attention (short rows), frozen weights, adapters on all four products, or on none."""
    (rows, length, width), (h, g, d) = x.shape, heads
    norm1, qkv, o, norm2, gate_up, down = weights
    y = _product(_norm(x, norm1, eps).view(-1, width), qkv, adapters[:2]).view(rows, length, h + 2 * g, d).transpose(1, 2)
    query, key, value = _turn(y[:, :h], cos, sin), _turn(y[:, h : h + g], cos, sin), y[:, h + g :]
    query = query.reshape(rows * g, h // g * length, d)
    scores = torch.bmm(query, key.reshape(rows * g, length, d).transpose(1, 2)).view(rows, h, length, length)
    shares = torch.softmax(scores.float() * d**-0.5 + mask, dim=-1).to(x.dtype)
    seen = torch.bmm(shares.view(rows * g, h // g * length, length), value.reshape(rows * g, length, d))
    seen = seen.view(rows, h, length, d).transpose(1, 2).reshape(rows * length, h * d)
    x = x + _product(seen, o, adapters[2:4]).view(rows, length, width)
    gate, up = _product(_norm(x, norm2, eps).view(-1, width), gate_up, adapters[4:6]).chunk(2, dim=-1)
    return x + _product(F.silu(gate) * up, down, adapters[6:8]).view(rows, length, width)


def forward(
    decoder: Decoder, projector: Callable[[Tensor, Tensor], Tensor], adapters: Sequence[tuple[Tensor, Tensor]], batch: Batch,
    layer: Callable[..., Tensor] = layer_forward,
) -> Tensor:  # fmt: skip
    """The final hidden states [answers, d] at the positions that predict answer tokens; everything on the device of the batch."""
    dtype, device = decoder.embedding.weight.dtype, batch.ids.device
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        seen = projector(batch.features, batch.places)
    x = F.embedding(batch.ids, decoder.embedding.weight).flatten(0, 1).index_copy(0, batch.visual, seen.to(dtype))
    return through(decoder, x.view(*batch.ids.shape, -1), batch, adapters, layer)


def through(
    decoder: Decoder, x: Tensor, batch: Batch, adapters: Sequence[tuple[Tensor, Tensor]] = (), layer: Callable[..., Tensor] = layer_forward
) -> Tensor:
    """The same of rows that are embedded already, [b, s, d]: from the first layer on, without adapters where none are given."""
    config, dtype = decoder.config, x.dtype
    frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, device=x.device) / config.head_dim)
    angle = batch.positions[:, None, :, None] * frequency
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    heads = (config.heads, config.kv_heads, config.head_dim)
    for i, block in enumerate(decoder.layers):
        assert isinstance(block, Layer)
        qkv, o, gate_up, down = (linear.weight for linear in _linears(block))
        weights = (block.norm1.weight, qkv, o, block.norm2.weight, gate_up, down)
        low = tuple(t for pair in adapters[4 * i : 4 * i + 4] for t in pair)
        x = layer(x, cos, sin, batch.mask, weights, low, heads, config.norm_eps)
    return _norm(x.flatten(0, 1)[batch.answers], decoder.norm.weight, config.norm_eps)


def loss_of(decoder: Decoder, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """(weighted mean cross-entropy, whether each answer token is the argmax)."""
    logits = (hidden @ decoder.embedding.weight.T).float()
    each = F.cross_entropy(logits, batch.labels, reduction="none")
    right = logits.detach().argmax(1) == batch.labels
    return (each * batch.weights).sum() / batch.weights.sum(), right
