"""Stage 1: teach the language model to read the visual tokens, by low-rank adapters and the projector, on packed question-answer pairs.

One row of a batch is [start][k visual tokens][question 1, answer 1][question 2, answer 2]...; every pair sees the start, the visual tokens
and itself, and its positions restart after the visual tokens, so one image pays for a dozen questions. k is drawn anew for every row:
most rows see a subset, so dropping tokens later is nothing new. A few rows are blind, so the model knows what guessing is.
Shapes are static (a row is filled up with questions), which lets torch.compile fuse what lies between the matrix products.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.apps.train_mini.features import Sample, Shard, cells_of
from mmsdk.apps.train_mini.questions import QA
from mmsdk.apps.train_mini.scenes import Thing
from mmsdk.decoder.transformer import Decoder, Layer
from mmsdk.models.mini.projector import Projector, place_features
from mmsdk.models.mini.words import BOS, EOS, asked
from mmsdk.models.types import Tokenizer

__all__ = ["Adapters", "Batch", "Recipe", "forward", "pack"]

_WEIGHTS = {"caption": 0.5, "count": 2.0}
_AIMED, _ON_THINGS = 0.9, (0.1, 0.6)


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
    """Low-rank updates of every linear layer of the decoder: W + scale * b @ a, kept in fp32."""

    def __init__(self, decoder: Decoder, rank: int, scale: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.scale = scale
        self.names = ("qkv", "o", "gate_up", "down")
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        for layer in decoder.layers:
            assert isinstance(layer, Layer)
            for linear in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down):
                out, inner = linear.weight.shape
                bound = 1 / math.sqrt(inner)
                self.a.append(nn.Parameter((torch.rand(rank, inner, generator=generator) * 2 - 1) * bound))
                self.b.append(nn.Parameter(torch.zeros(out, rank)))

    def tensors(self) -> dict[str, Tensor]:
        """`lora.{layer}.{name}.{a|b}`, the scale folded into b."""
        found = {}
        for i, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            key = f"lora.{i // 4}.{self.names[i % 4]}"
            found[f"{key}.a"], found[f"{key}.b"] = a.detach(), b.detach() * self.scale
        return found

    def cast(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """(a, scale * b) of every layer in the compute dtype, differentiable."""
        return [(a.to(dtype), (b * self.scale).to(dtype)) for a, b in zip(self.a, self.b, strict=True)]


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
    """One llama layer, written for training: explicit attention (short rows), frozen weights, adapters on all four products."""
    (rows, length, width), (h, g, d) = x.shape, heads
    norm1, qkv, o, norm2, gate_up, down = weights
    y = _adapted(_norm(x, norm1, eps).view(-1, width), qkv, *adapters[:2]).view(rows, length, h + 2 * g, d).transpose(1, 2)
    query, key, value = _turn(y[:, :h], cos, sin), _turn(y[:, h : h + g], cos, sin), y[:, h + g :]
    query = query.reshape(rows * g, h // g * length, d)
    scores = torch.bmm(query, key.reshape(rows * g, length, d).transpose(1, 2)).view(rows, h, length, length)
    shares = torch.softmax(scores.float() * d**-0.5 + mask, dim=-1).to(x.dtype)
    seen = torch.bmm(shares.view(rows * g, h // g * length, length), value.reshape(rows * g, length, d))
    seen = seen.view(rows, h, length, d).transpose(1, 2).reshape(rows * length, h * d)
    x = x + _adapted(seen, o, *adapters[2:4]).view(rows, length, width)
    gate, up = _adapted(_norm(x, norm2, eps).view(-1, width), gate_up, *adapters[4:6]).chunk(2, dim=-1)
    return x + _adapted(F.silu(gate) * up, down, *adapters[6:8]).view(rows, length, width)


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows. `visual` lists the places of visual tokens in the flattened batch, in the order of `features`.

    `answers` are the places that predict an answer token, `labels` those tokens, `owner` the number of the question that each belongs to,
    and `kinds` the type of each question.
    """

    ids: Tensor
    positions: Tensor
    mask: Float[Tensor, "b 1 s s"]
    visual: Tensor
    features: Tensor
    places: Tensor
    answers: Tensor
    labels: Tensor
    weights: Tensor
    owner: Tensor
    kinds: tuple[str, ...]


def _pair(qa: QA, tokenizer: Tokenizer, cache: dict[str, list[int]]) -> tuple[list[int], list[int]]:
    """Ids of the question part and of the answer part, ended by EOS."""
    question, answer = asked(qa.question), f" {qa.answer}"
    for text in (question, answer):
        if text not in cache:
            cache[text] = tokenizer.encode(text)
    return cache[question], [*cache[answer], EOS]


def _enough(sample: Sample, rng: np.random.Generator) -> list[QA]:
    """Questions in several wordings, so that a row of a sample with little to ask is filled all the same."""
    found = sample.questions(rng)
    for _ in range(4):
        if len(found) < 16:
            found += sample.questions(rng)
    return list(dict.fromkeys(found))


def _subset(shard: Shard, i: int, k: int, rng: np.random.Generator) -> Tensor:
    """k of sample i's tokens, ascending; a clip gives the same number from every frame.

    Most times tokens on things go first, one of each thing before a second of any, up to a share drawn from `_ON_THINGS`: where chance
    alone decides, a small thing is often gone altogether, and the model is taught to guess; where things fill most of what is shown, it is
    lost among the many tokens of a whole clip.
    """
    n, grid = int(shard.counts[i]), shard.grids[i].tolist()
    if k >= n:
        return torch.arange(n)
    plane, share = n // grid[0], k // grid[0]
    cells = cells_of(shard.samples[i], grid) if rng.random() < _AIMED else []
    most = round(rng.uniform(*_ON_THINGS) * share)
    keep = []
    for t in range(grid[0]):
        order = rng.permutation(plane)
        things = _in_turn([(index - t * plane, thing) for index, thing in cells if index // plane == t], rng)[:most]
        others = np.setdiff1d(order, things, assume_unique=True)
        chosen = np.concatenate((things, rng.permutation(others)[: share - len(things)]))
        keep.append(t * plane + np.sort(chosen))
    return torch.from_numpy(np.concatenate(keep))


def _in_turn(cells: Sequence[tuple[int, Thing]], rng: np.random.Generator) -> np.ndarray:
    """The cells in a random order: the first of every thing, then the second of every thing, and so on; a shared cell counts once."""
    queues: dict[int, list[int]] = {}
    for i in rng.permutation(len(cells)):
        index, thing = cells[int(i)]
        queues.setdefault(id(thing), []).append(index)
    turns = [index for turn in itertools.zip_longest(*queues.values()) for index in turn if index is not None]
    return np.array(list(dict.fromkeys(turns)), dtype=int)


def pack(
    shard: Shard, rows: Sequence[int], length: int, budgets: Sequence[int], tokenizer: Tokenizer, rng: np.random.Generator,
    cache: dict[str, list[int]], blind: float = 0.0, seen: Sequence[int] | None = None, once: bool = False,
) -> Batch:  # fmt: skip
    """Rows of `length` tokens: the visual tokens of each sample (at most its budget) and as many of its questions as fit.

    `seen` shows the tokens of other samples instead, as a control; `once` asks every question in one wording only.
    """
    ids = torch.full((len(rows), length), EOS)
    positions = torch.zeros(len(rows), length, dtype=torch.long)
    segment = torch.full((len(rows), length), -1)
    visual: list[Tensor] = []
    features: list[Tensor] = []
    places: list[Tensor] = []
    answers: list[int] = []
    labels: list[int] = []
    weights: list[float] = []
    owner: list[int] = []
    kinds: list[str] = []
    for r, (i, shown, budget) in enumerate(zip(rows, rows if seen is None else seen, budgets, strict=True)):
        sample: Sample = shard.samples[i]
        tokens = shard.tokens(shown, _subset(shard, shown, budget, rng))
        k = len(tokens)
        features.append(tokens.features)
        places.append(place_features(tokens))
        visual.append(torch.arange(1, k + 1) + r * length)
        ids[r, 0] = BOS
        positions[r, : k + 1] = torch.arange(k + 1)
        segment[r, : k + 1] = 0
        at, part = k + 1, 0
        questions = sample.questions(rng) if once else _enough(sample, rng)
        for index in rng.permutation(len(questions)):
            qa = questions[int(index)]
            asked, answer = _pair(qa, tokenizer, cache)
            size = len(asked) + len(answer)
            if at + size > length:
                continue
            part += 1
            ids[r, at : at + size] = torch.tensor(asked + answer)
            positions[r, at : at + size] = torch.arange(size) + k + 1
            segment[r, at : at + size] = part
            start = r * length + at + len(asked) - 1
            answers += range(start, start + len(answer))
            labels += answer
            weights += [_WEIGHTS.get(qa.type, 1.0)] * len(answer)
            owner += [len(kinds)] * len(answer)
            kinds.append(qa.type)
            at += size
    mask = _mask(segment, torch.from_numpy(rng.random(len(rows)) < blind))
    return Batch(
        ids, positions, mask, torch.cat(visual), torch.cat(features), torch.cat(places),
        torch.tensor(answers, dtype=torch.long), torch.tensor(labels, dtype=torch.long), torch.tensor(weights),
        torch.tensor(owner, dtype=torch.long), tuple(kinds),
    )  # fmt: skip


def _mask(segment: Tensor, blind: Tensor) -> Tensor:
    """0 where a token may look, -inf elsewhere: back only, at the prefix and its own pair; blind rows see the prefix's start alone."""
    same = segment[:, :, None] == segment[:, None, :]
    prefix = (segment == 0)[:, None, :] & ~(blind[:, None, None] & (torch.arange(segment.shape[1]) > 0))
    causal = torch.ones(segment.shape[1], segment.shape[1], dtype=torch.bool).tril()
    seen = (same | prefix) & causal
    return torch.where(seen, 0.0, -torch.inf).unsqueeze(1)


def forward(
    decoder: Decoder, projector: Projector, adapters: Sequence[tuple[Tensor, Tensor]], batch: Batch,
    layer: Callable[..., Tensor] = layer_forward,
) -> Tensor:  # fmt: skip
    """The final hidden states [answers, d] at the positions that predict answer tokens."""
    config = decoder.config
    dtype = decoder.embedding.weight.dtype
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        seen = projector(batch.features, batch.places)
    x = F.embedding(batch.ids, decoder.embedding.weight).flatten(0, 1).index_copy(0, batch.visual, seen.to(dtype))
    x = x.view(*batch.ids.shape, -1)
    frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    angle = batch.positions[:, None, :, None] * frequency
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    heads = (config.heads, config.kv_heads, config.head_dim)
    for i, block in enumerate(decoder.layers):
        assert isinstance(block, Layer)
        a = block.attention
        weights = (block.norm1.weight, a.qkv.weight, a.o.weight, block.norm2.weight, block.mlp.gate_up.weight, block.mlp.down.weight)
        low = tuple(t for pair in adapters[4 * i : 4 * i + 4] for t in pair)
        x = layer(x, cos, sin, batch.mask, weights, low, heads, config.norm_eps)
    return _norm(x.flatten(0, 1)[batch.answers], decoder.norm.weight, config.norm_eps)


def loss_of(decoder: Decoder, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """(weighted mean cross-entropy, whether each answer token is the argmax)."""
    logits = (hidden @ decoder.embedding.weight.T).float()
    each = F.cross_entropy(logits, batch.labels, reduction="none")
    right = logits.detach().argmax(1) == batch.labels
    return (each * batch.weights).sum() / batch.weights.sum(), right
