"""Attention and rotation have the properties that their definitions promise, without a GPU."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from mmsdk.kernels.ops.block_sparse import block_sparse, listed
from mmsdk.kernels.ops.flash_prefill import flash_prefill
from mmsdk.kernels.ops.mla_decode import mla_decode
from mmsdk.kernels.ops.paged_decode import paged_decode
from mmsdk.kernels.ops.rope import rope


def near(ours: Tensor, truth: Tensor, tolerance: float) -> None:
    """Whole numbers are the same ones."""
    tolerance = tolerance if ours.is_floating_point() else 0.0
    torch.testing.assert_close(ours.double(), truth.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_attention_equals_torch_on_one_sequence(causal: bool) -> None:
    query, keys, values = normal(9, 6, 16), normal(9, 2, 16, seed=1), normal(9, 2, 16, seed=2)
    starts = torch.tensor([0, 9], dtype=torch.int32)
    out, _ = flash_prefill(query, keys, values, starts, starts, 9, 0.25, causal)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (query, keys, values)), is_causal=causal, enable_gqa=True, scale=0.25
    )
    near(out, expected[0].transpose(0, 1), 1e-5)


def test_ka_08_parts_merge_and_an_empty_part_changes_nothing() -> None:
    query, keys, values = normal(3, 2, 16), normal(10, 2, 16, seed=1), normal(10, 2, 16, seed=2)

    def part(begin: int, end: int) -> tuple[Tensor, Tensor]:
        starts, entries = torch.tensor([0, 3]), torch.tensor([0, end - begin])
        return flash_prefill(query, keys[begin:end], values[begin:end], starts, entries, 3, 0.25, causal=False)

    (out_1, lse_1), (out_2, lse_2), (whole, lse) = part(0, 4), part(4, 10), part(0, 10)
    merged = torch.logaddexp(lse_1, lse_2)
    near(merged, lse, 1e-5)
    near(out_1 * (lse_1 - merged).exp()[..., None] + out_2 * (lse_2 - merged).exp()[..., None], whole, 1e-5)
    nothing, empty = part(4, 4)
    assert not nothing.any() and (empty == -torch.inf).all()
    assert torch.equal(torch.logaddexp(lse_1, empty), lse_1)


def test_absorbed_attention_over_latents_equals_attention_over_expanded_heads() -> None:
    """Multi-head latent attention: keys and values per head made from the latent, against queries carried into the latent's space."""
    h, d, latent, turned, n = 3, 8, 16, 4, 40
    to_key, to_value = normal(h, d, latent), normal(h, d, latent, seed=1)
    content, shared = normal(n, latent, seed=2), normal(n, turned, seed=3)
    query, query_turned = normal(h, d, seed=4), normal(h, turned, seed=5)
    keys = torch.cat((torch.einsum("hdc,tc->htd", to_key, content), shared.expand(h, n, turned)), -1)
    values = torch.einsum("hdc,tc->htd", to_value, content)
    full = torch.cat((query, query_turned), -1)[:, None]
    expected = F.scaled_dot_product_attention(full, keys, values, scale=0.2)[:, 0]
    absorbed = torch.cat((torch.einsum("hd,hdc->hc", query, to_key), query_turned), -1)[None]
    cache = F.pad(torch.cat((content, shared), -1), (0, 0, 0, 8)).view(3, 16, latent + turned)
    out, _ = mla_decode(absorbed, cache, torch.arange(3)[None], torch.tensor([n]), 0.2, latent)
    near(torch.einsum("hdc,hc->hd", to_value, out[0]), expected, 1e-5)


@pytest.mark.parametrize("length", [2047, 2048, 2049])
def test_ka_07_a_window_of_2048_holds_2048_tokens_with_the_newest(length: int) -> None:
    """Keys of zero weigh all alike, so the log-sum-exp counts them and the mixture of positions tells which."""
    place = torch.arange(length).float()[:, None, None]
    first = max(length - 2048, 0)
    counted, middle = math.log(length - first), (first + length - 1) / 2
    starts, entries = torch.tensor([0, 1]), torch.tensor([0, length])
    out, lse = flash_prefill(torch.ones(1, 1, 1), place * 0, place, starts, entries, 1, 1.0, window=2048)
    assert float(lse) == pytest.approx(counted) and float(out) == pytest.approx(middle)
    pages = -(-length // 16)
    cache = F.pad(place, (0, 0, 0, 0, 0, pages * 16 - length)).view(pages, 16, 1, 1)
    table = torch.arange(pages, dtype=torch.int32)[None]
    out, lse = paged_decode(torch.ones(1, 1, 1), cache * 0, cache, table, torch.tensor([length]), 1.0, window=2048)
    assert float(lse) == pytest.approx(counted) and float(out) == pytest.approx(middle)


def test_the_order_of_pages_in_memory_does_not_matter() -> None:
    query, keys, values = normal(1, 2, 8), normal(4, 16, 1, 8, seed=1), normal(4, 16, 1, 8, seed=2)
    order, length = torch.tensor([2, 0, 3, 1]), torch.tensor([50])
    straight = paged_decode(query, keys, values, torch.arange(4)[None], length, 0.3)
    shuffled = paged_decode(query, keys[order], values[order], order.argsort()[None], length, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(straight, shuffled, strict=True))


def test_block_lists_of_all_blocks_are_dense_attention() -> None:
    query, keys, values = normal(1, 2, 50, 16), normal(1, 2, 70, 16, seed=1), normal(1, 2, 70, 16, seed=2)
    out, _ = block_sparse(query, keys, values, *listed(torch.ones(1, 2, 4, 5, dtype=torch.bool)), (16, 16), 0.25)
    near(out, F.scaled_dot_product_attention(query, keys, values, scale=0.25), 1e-5)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_ka_04_the_block_size_that_was_asked_for_is_the_one_that_counts(size: int) -> None:
    """A list that holds the first block of keys alone shows the first `size` keys, and the mean of their places tells how many."""
    place = torch.arange(256.0)[None, None, :, None]
    mask = torch.arange(256 // size).expand(1, 1, 256 // size, -1) == 0
    out, lse = block_sparse(place * 0, place * 0, place, *listed(mask), (size, size), 1.0)
    assert (out == (size - 1) / 2).all() and lse[0, 0, 0] == pytest.approx(math.log(size))


def test_rotation_leaves_what_it_was_given_as_it_was() -> None:
    """Values stand beside queries and keys in one projection, and no bit of it changes."""
    fused = normal(1, 5, 4, 8).transpose(1, 2)
    before = fused.clone()
    angles = normal(1, 1, 5, 4)
    query, keys = rope(fused[:, :2], fused[:, 2:3], angles.cos(), angles.sin(), (4,))
    assert torch.equal(fused, before) and not torch.equal(query, before[:, :2])
    near(query.norm(dim=-1), before[:, :2].norm(dim=-1), 1e-5)
    back, _ = rope(query, keys, angles.cos(), -angles.sin(), (4,))
    near(back, before[:, :2], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turns", [False, True])
def test_sections_are_those_of_qwens_models(turns: bool, dtype: torch.dtype) -> None:
    """transformers' own classes: Qwen2-VL's sections one after another, Qwen3-VL's by turns."""
    sections, d = ((24, 20, 20), 128) if turns else ((16, 24, 24), 128)
    turning = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    text: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": d, "rope_parameters": turning}
    positions = torch.randint(0, 500, (3, 2, 9), generator=torch.Generator().manual_seed(0))
    query, keys = normal(2, 2, 9, d).to(dtype), normal(2, 1, 9, d, seed=1).to(dtype)
    if turns:
        rotary = qwen3_vl.Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(**text))
    else:
        rotary = qwen2_vl.Qwen2VLRotaryEmbedding(Qwen2VLTextConfig(**text))
    angles = positions[..., None].float() * rotary.inv_freq
    ours = rope(query, keys, angles.cos(), angles.sin(), sections, turns=turns)
    theirs = qwen3_vl.apply_rotary_pos_emb(query.float(), keys.float(), *rotary(query.float(), positions))
    for a, b in zip(ours, theirs, strict=True):
        near(a, b.to(dtype), 1e-5 if dtype == torch.float32 else 2e-2)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    query, keys = normal(1, 1, 1, 8).expand(1, 1, 6, 8), normal(1, 1, 1, 8, seed=1).expand(1, 1, 6, 8)
    angles = torch.arange(6.0)[None, None, :, None] * torch.tensor([1.0, 0.5, 0.1, 0.01])
    turned, turned_keys = rope(query, keys, angles.cos(), angles.sin(), (4,), interleaved=True)
    products = turned[0, 0] @ turned_keys[0, 0].T
    assert torch.equal(turned[0, 0, 0], query[0, 0, 0])
    for distance in range(-5, 6):
        along = products.diagonal(distance)
        near(along, along[:1].expand_as(along), 1e-5)
