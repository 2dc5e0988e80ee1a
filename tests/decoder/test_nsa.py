"""NSA against loops over queries, blocks and tokens, written from the paper; and what its branches reduce to."""

import math

import pytest
import torch
from torch import Tensor

from mmsdk.attention.nsa import Sparsity, blocks_of, choose, coarse, fine, importance
from mmsdk.decoder.nsa import NativeSparseAttention
from mmsdk.decoder.rope import Rope, Unscaled
from mmsdk.errors import InputError, ModelError
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.none import NoCache

B, H, G, D, T, W = 2, 6, 2, 8, 45, 20
SIZES = Sparsity(block=4, stride=2, selected=6, count=3, initial=1, local=1, window=7)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def soft(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, list[float]]:
    """One query over some keys, in double precision; nothing gives zero."""
    logits = [float(query.double() @ key.double()) / math.sqrt(D) for key in keys]
    weights = [math.exp(logit) for logit in logits]
    shares = [weight / sum(weights) for weight in weights]
    return sum((share * value.double() for share, value in zip(shares, values, strict=True)), torch.zeros(D).double()), shares


def slow_choice(query: Tensor, keys: Tensor, row: int, group: int, at: int) -> set[int]:
    """The blocks of equation 9 to 12 for the query heads of one group at one position."""
    count, own = -(-T // SIZES.selected), at // SIZES.selected
    worth = [0.0] * count
    for head in range(group * H // G, (group + 1) * H // G):
        visible = [i for i in range(keys.shape[2]) if i * SIZES.stride + SIZES.block - 1 <= at]
        _, shares = soft(query[row, head, at], [keys[row, group, i] for i in visible], [torch.zeros(D)] * len(visible))
        for i, share in zip(visible, shares, strict=True):
            for unit in range(i, i + SIZES.block // SIZES.stride):
                block = unit * SIZES.stride // SIZES.selected
                if block < count:
                    worth[block] += share
    forced = {0, own}
    others = sorted((block for block in range(own) if block not in forced), key=lambda block: -worth[block])
    return forced | set(others[: SIZES.count - len(forced)])


def test_compressed_branch_and_choice_equal_loops() -> None:
    query, keys, values = noise(B, H, T, D), noise(B, G, 21, D), noise(B, G, 21, D, seed=1)
    out, weights = coarse(query, keys, values, T, SIZES)
    index = choose(importance(weights, G, T, SIZES), T, SIZES)
    for row in range(B):
        for at in range(0, T, 3):
            for head in range(H):
                visible = [i for i in range(21) if i * 2 + 3 <= at]
                group = head // (H // G)
                want, _ = soft(query[row, head, at], [keys[row, group, i] for i in visible], [values[row, group, i] for i in visible])
                torch.testing.assert_close(out[row, head, at], want.float(), rtol=0, atol=1e-5)
            for group in range(G):
                assert {block for block in index[row, group, at].tolist() if block >= 0} == slow_choice(query, keys, row, group, at)


def test_chosen_blocks_are_read_up_to_the_query_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmsdk.attention.nsa._SLICE", 2000)
    query, keys, values = noise(B, H, T, D), noise(B, G, T, D), noise(B, G, T, D, seed=1)
    index = choose(noise(B, G, T, 8), T, SIZES)
    out = fine(query, keys, values, index, SIZES)
    for row in range(B):
        for head in range(H):
            for at in range(0, T, 4):
                blocks = index[row, head // 3, at].tolist()
                places = [place for place in range(at + 1) if place // SIZES.selected in blocks]
                want, _ = soft(query[row, head, at], list(keys[row, head // 3, places]), list(values[row, head // 3, places]))
                torch.testing.assert_close(out[row, head, at], want.float(), rtol=0, atol=1e-5)


def layer(sizes: Sparsity) -> NativeSparseAttention:
    attention, generator = NativeSparseAttention(W, H, G, D, sizes), torch.Generator().manual_seed(0)
    for weight in attention.parameters():
        torch.nn.init.normal_(weight, 0, 0.25, generator)
    return attention


def run(attention: NativeSparseAttention, x: Tensor, cache: DenseCache | NoCache, start: int = 0) -> Tensor:
    positions = torch.arange(start, start + x.shape[1]).expand(x.shape[0], -1)
    cache.advance(positions)
    return attention(x, Rope(D, 1e4, Unscaled())(positions, x.dtype), cache, 0)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 13])
def test_decoding_in_chunks_equals_one_pass(chunk: int) -> None:
    attention, x = layer(SIZES), noise(B, T, W)
    with torch.no_grad():
        whole = run(attention, x, NoCache())
        cache = DenseCache.allocate(1, B, 3 * G, D, 8, torch.float32, "cpu")
        parts = [run(attention, piece, cache, start) for start, piece in zip(range(0, T, chunk), x.split(chunk, 1), strict=True)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)


def test_window_branch_is_sliding_attention_and_all_blocks_are_dense_attention() -> None:
    everything = Sparsity(block=4, stride=2, selected=6, count=8, initial=1, local=1, window=7)
    attention, x = layer(everything), noise(B, T, W)
    cache = NoCache()
    run(attention, x, cache)
    query = noise(B, H, T, D)
    view = cache.append(0, noise(B, 3 * G, T, D), noise(B, 3 * G, T, D, seed=1))
    _, chosen, near = attention.branches(query, view)
    behind = torch.arange(T)[:, None] - torch.arange(T)
    for branch, place, seen in ((chosen, 1, behind >= 0), (near, 2, (behind >= 0) & (behind < 7))):
        keys, values = (part.chunk(3, dim=1)[place].repeat_interleave(H // G, dim=1) for part in (view.keys, view.values))
        want = torch.nn.functional.scaled_dot_product_attention(query, keys, values, seen)
        torch.testing.assert_close(branch, want, rtol=0, atol=1e-5)


def test_no_token_sees_a_later_one_and_gradients_are_numbers() -> None:
    attention, x = layer(SIZES), noise(1, T, W).requires_grad_()
    run(attention, x, NoCache())[0, 20].sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert (x.grad[0, 21:] == 0).all() and (x.grad[0, :21].abs().sum(-1) > 0).all()


def test_short_rows_and_padding() -> None:
    attention = layer(SIZES)
    assert run(attention, noise(1, 2, W), NoCache()).isfinite().all()
    assert blocks_of(noise(1, G, 3, D), SIZES).shape == (1, G, 0, 4, D)
    cache = NoCache()
    cache.advance(torch.tensor([[-1, 0, 1]]))
    with pytest.raises(InputError, match="one length"):
        attention(noise(1, 3, W), Rope(D, 1e4, Unscaled())(torch.tensor([[-1, 0, 1]]), torch.float32), cache, 0)
    with pytest.raises(ModelError, match="stride"):
        Sparsity(block=5)
    with pytest.raises(ModelError, match="local"):
        Sparsity(count=2)
