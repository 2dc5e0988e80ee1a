"""HiLS against loops over queries, chunks and tokens, written from the formulas."""

import math

import pytest
import torch
from torch import Tensor

from mmsdk.attention.banded import banded
from mmsdk.attention.hils import Hierarchy, chosen, landmarks, mixed, worth
from mmsdk.decoder.hils import LandmarkAttention
from mmsdk.decoder.rope import Rope, Unscaled
from mmsdk.errors import InputError, ModelError
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.none import NoCache

B, H, G, D, T, W = 2, 4, 2, 8, 43, 20
SIZES = Hierarchy(chunk=4, topk=3, window=6)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def attended(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, float]:
    """One query over keys [n d], and the log-sum-exp, in double precision."""
    scores = keys.double() @ query.double() / math.sqrt(D)
    return scores.softmax(0) @ values.double(), float(scores.logsumexp(0))


def slow(query: Tensor, marks: Tensor, keys: Tensor, values: Tensor, near: Tensor, row: int, group: int, at: int) -> list[Tensor]:
    """The outputs of the heads of one group at one position; `near` holds the window's own keys."""
    heads = range(group * H // G, (group + 1) * H // G)
    low = max(0, at - SIZES.window + 1)
    windows = [attended(query[row, head, at], near[row, group, low : at + 1], values[row, group, low : at + 1]) for head in heads]
    eligible, scores = range(max(0, (at - SIZES.window + 1) // SIZES.chunk)), {}
    for chunk in eligible:
        inside = keys[row, group, chunk * 4 : chunk * 4 + 4].double()
        p = (inside @ marks[row, group, chunk * 4 + 3].double() / math.sqrt(D)).softmax(0)
        entropy = -float((p * p.log()).sum())
        for head in heads:
            scores[head, chunk] = float(query[row, head, at].double() @ (p @ inside)) / math.sqrt(D) + entropy
    rank = {}
    for chunk in eligible:
        for head, (_, lse) in zip(heads, windows, strict=True):
            total = math.log(sum(math.exp(scores[head, other]) for other in eligible) + math.exp(lse))
            rank[chunk] = max(rank.get(chunk, -math.inf), scores[head, chunk] - total)
    best = sorted(rank, key=lambda chunk: -rank[chunk])[: SIZES.topk]
    outs = []
    for head, (window, lse) in zip(heads, windows, strict=True):
        logits = torch.tensor([*(scores[head, chunk] for chunk in best), lse]).double()
        places = [slice(chunk * 4, chunk * 4 + 4) for chunk in best]
        parts = [attended(query[row, head, at], keys[row, group, place], values[row, group, place])[0] for place in places]
        outs.append(logits.softmax(0) @ torch.stack([*parts, window]))
    return outs


def test_the_whole_equals_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmsdk.attention.hils._SLICE", 2000)
    query, marks, near = noise(B, H, T, D), noise(B, G, T, D, seed=2), noise(B, G, T, D, seed=3)
    keys, values = noise(B, G, T, D), noise(B, G, T, D, seed=1)
    inside, behind = (part[:, :, :40].unflatten(2, (-1, 4)) for part in (keys, values))
    window = banded(query, near, values, SIZES.window)
    scores = worth(query, *landmarks(marks[:, :, 3:40:4], inside), torch.arange(T), SIZES)
    index = chosen(scores, window[1].unflatten(1, (G, -1)), SIZES.topk)
    out = mixed(query, inside, behind, scores, index, window)
    for row in range(B):
        for group in range(G):
            for at in range(T):
                for head, want in enumerate(slow(query, marks, keys, values, near, row, group, at), start=group * H // G):
                    torch.testing.assert_close(out[row, head, at], want.float(), rtol=0, atol=1e-5)
    # chunks end before the window begins, so that no token counts twice
    last = (index.amax(-1) + 1) * SIZES.chunk
    assert (last <= torch.arange(T) - SIZES.window + 1).logical_or(index.amax(-1) < 0).all()


def test_a_landmark_is_exact_for_equal_keys_and_for_its_own_query() -> None:
    size, keys, marks = 64, noise(1, 1, 3, 64, D), noise(1, 1, 3, D)
    key, bias = landmarks(marks, keys)
    assert (bias >= 0).all() and (bias <= math.log(size) + 1e-6).all()
    exact = (keys @ marks[..., None] * D**-0.5)[..., 0].logsumexp(-1)
    torch.testing.assert_close((marks * key).sum(-1) * D**-0.5 + bias, exact, rtol=0, atol=1e-5)
    equal = keys[:, :, :, :1].expand(-1, -1, -1, size, -1)
    key, bias = landmarks(marks, equal)
    torch.testing.assert_close(bias, torch.full_like(bias, math.log(size)), rtol=0, atol=1e-5)
    query = noise(1, 1, 3, D, seed=5)
    torch.testing.assert_close(
        (query * key).sum(-1) * D**-0.5 + bias, (equal @ query[..., None] * D**-0.5)[..., 0].logsumexp(-1), rtol=0, atol=1e-5
    )


def layer() -> LandmarkAttention:
    attention, generator = LandmarkAttention(W, H, G, D, SIZES, Rope(D, 1e4, Unscaled()), rank=6), torch.Generator().manual_seed(0)
    for weight in attention.parameters():
        torch.nn.init.normal_(weight, 0, 0.25, generator)
    return attention


def run(attention: LandmarkAttention, x: Tensor, cache: DenseCache | NoCache, start: int = 0) -> Tensor:
    cache.advance(torch.arange(start, start + x.shape[1]).expand(x.shape[0], -1))
    return attention(x, cache, 0)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 17])
def test_decoding_in_chunks_equals_one_pass(chunk: int) -> None:
    attention, x = layer(), noise(B, T, W)
    with torch.no_grad():
        whole = run(attention, x, NoCache())
        cache = DenseCache.allocate(1, B, 2 * G, D, 8, torch.float32, "cpu")
        parts = [run(attention, piece, cache, start) for start, piece in zip(range(0, T, chunk), x.split(chunk, 1), strict=True)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)


def test_without_an_eligible_chunk_it_is_rotated_sliding_attention() -> None:
    attention, rope = layer(), Rope(D, 1e4, Unscaled())
    query, keys, values, cache = noise(1, H, 9, D), noise(1, 2 * G, 9, D), noise(1, 2 * G, 9, D, seed=1), NoCache()
    cache.advance(torch.arange(9)[None])
    out, turn = attention.attend(query, cache.append(0, keys, values)), rope(torch.arange(9)[None], torch.float32)
    behind = torch.arange(9)[:, None] - torch.arange(9)
    wide = [part[:, :G].repeat_interleave(H // G, dim=1) for part in (turn(keys), values)]
    want = torch.nn.functional.scaled_dot_product_attention(turn(query), *wide, (behind >= 0) & (behind < SIZES.window))
    torch.testing.assert_close(out, want, rtol=0, atol=1e-5)


def test_no_token_sees_a_later_one_and_gradients_are_numbers() -> None:
    attention, x = layer(), noise(1, T, W).requires_grad_()
    run(attention, x, NoCache())[0, 30].sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and (x.grad[0, 31:] == 0).all()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in attention.parameters())


def test_padding_and_sizes_are_refused() -> None:
    cache = NoCache()
    cache.advance(torch.tensor([[-1, 0, 1]]))
    with pytest.raises(InputError, match="one length"):
        layer()(noise(1, 3, W), cache, 0)
    with pytest.raises(ModelError, match="above 0"):
        Hierarchy(topk=0)
