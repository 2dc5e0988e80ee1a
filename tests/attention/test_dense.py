"""Dense attention against a slow reference in float64 that expands keys and values and loops over queries."""

import math

import pytest
import torch
from torch import Tensor

from mmsdk.attention.dense import Dense
from mmsdk.attention.mask import Bias, Causal, Everything, Masks
from mmsdk.attention.types import Attention
from mmsdk.errors import InputError
from mmsdk.kv.none import NoCache
from mmsdk.kv.types import LayerView

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def tensors(b: int, h: int, g: int, s: int, t: int, d: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(s + 31 * t + 7 * h)
    shapes = (b, h, s, d), (b, g, t, d), (b, g, t, d)
    query, keys, values = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, keys, values


def view(keys: Tensor, values: Tensor, positions: Tensor, ordered: bool = False) -> LayerView:
    valid = positions >= 0
    return LayerView(keys, values, positions, valid, valid.sum(1), ordered)


def reference(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """`seen` is [b s t]; one query at a time."""
    b, h, s, d = query.shape
    share = h // keys.shape[1]
    out = torch.zeros(b, h, s, d, dtype=torch.float64)
    for row in range(b):
        for head in range(h):
            for i in range(s):
                at = seen[row, i].nonzero()[:, 0]
                k, v = (x[row, head // share, at].double() for x in (keys, values))
                if len(at):
                    out[row, head, i] = (k @ query[row, head, i].double() / math.sqrt(d)).softmax(0) @ v
    return out


def seen_by_position(queries: Tensor, entries: Tensor) -> Tensor:
    return (entries[:, None, :] >= 0) & (entries[:, None, :] <= queries[:, :, None])


def test_it_is_an_attention() -> None:
    assert isinstance(Dense(), Attention)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 24])
def test_ka_12_query_heads_share_key_value_heads_in_order(group: int, dtype: torch.dtype) -> None:
    query, keys, values = tensors(2, 2 * group, 2, 5, 9, dtype=dtype)
    entries = torch.arange(9).expand(2, -1)
    queries = entries[:, 4:]
    stored = view(keys, values, entries)
    out = Dense()(query, stored, Masks(queries, dtype, None).of(stored))
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), reference(query, keys, values, seen_by_position(queries, entries)), rtol=0, atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", [False, True])
def test_ka_08_a_query_that_sees_nothing_gets_zero_and_no_gradient(gradients: bool, dtype: torch.dtype) -> None:
    query, keys, values = (x.requires_grad_(gradients) for x in tensors(3, 4, 2, 6, 6, dtype=dtype))
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [-1, -1, 0, 1, 2, 3], [0, 1, 2, -1, -1, -1]])
    stored = view(keys, values, positions)
    out = Dense()(query, stored, Masks(positions, dtype, None).of(stored))
    assert torch.equal(out.transpose(1, 2)[positions < 0], torch.zeros(5, 4, 16, dtype=dtype))
    expected = reference(query.detach(), keys.detach(), values.detach(), seen_by_position(positions, positions))
    torch.testing.assert_close(out.detach().double(), expected, rtol=0, atol=TOLERANCE[dtype])
    if gradients:
        out.float().square().sum().backward()
        for tensor in (query, keys, values):
            assert tensor.grad is not None and tensor.grad.isfinite().all()
            assert tensor.grad.transpose(1, 2)[positions < 0].abs().max() == 0


def test_both_ways_of_computing_agree_on_values_and_gradients() -> None:
    mask = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(0)) > 0.3
    grads = []
    for dtype in (torch.float32, torch.bfloat16):  # the second takes the plain products
        query, keys, values = (x.to(dtype).requires_grad_() for x in tensors(2, 6, 2, 7, 7))
        stored = view(keys, values, torch.arange(7).expand(2, -1))
        out = Dense()(query, stored, Masks(stored.positions, dtype, mask).of(stored))
        out.float().pow(2).sum().backward()
        grads.append([tensor.float() for tensor in (out.detach(), query.grad, keys.grad, values.grad) if tensor is not None])
    assert len(grads[0]) == 4
    for exact, rounded in zip(*grads, strict=True):
        torch.testing.assert_close(rounded, exact, rtol=0.03, atol=0.05)


def test_explicit_masks_boolean_or_additive_say_alone_who_sees_what() -> None:
    query, keys, values = tensors(2, 4, 2, 5, 8)
    seen = torch.rand(2, 1, 5, 8, generator=torch.Generator().manual_seed(1)) > 0.5
    seen[0, 0, 2] = False
    stored = view(keys, values, torch.full((2, 8), -1))
    expected = reference(query, keys, values, seen[:, 0])
    for mask in (seen, torch.zeros(2, 1, 5, 8).masked_fill(~seen, -torch.inf)):
        out = Dense()(query, stored, Masks(torch.zeros(2, 5, dtype=torch.long), torch.float32, mask).of(stored))
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_ka_03_a_mask_for_another_length_is_refused() -> None:
    _, keys, values = tensors(1, 2, 2, 4, 1000)
    masks = Masks(torch.arange(4)[None], torch.float32, torch.ones(1, 1, 4, 1024, dtype=torch.bool))
    with pytest.raises(InputError, match=r"mask.*\(4, 1024\).*1000 entries"):
        masks.of(view(keys, values, torch.arange(1000)[None]))


WAYS = {"fused": (torch.float32, False), "products": (torch.bfloat16, True), "tiles": (torch.bfloat16, False)}


@pytest.mark.parametrize("way", WAYS)
def test_ka_05_a_mask_that_hides_nothing_is_none_and_padding_is_honoured_every_way(way: str) -> None:
    """By torch's attention, by plain products where there are gradients, and by C++ where this machine has AVX-512 BF16."""
    dtype, gradients = WAYS[way]
    query, keys, values = (x.requires_grad_(gradients) for x in tensors(2, 4, 2, 5, 8, d=32, dtype=dtype))
    entries, last = torch.arange(8).repeat(2, 1), torch.full((2, 5), 7)
    stored, mask = view(keys, values, entries), torch.ones(2, 1, 5, 8, dtype=torch.bool)
    masked, plain = (Dense()(query, stored, Masks(last, dtype, one).of(stored)) for one in (mask, None))
    torch.testing.assert_close(masked, plain, rtol=0, atol=TOLERANCE[dtype])
    mask[1, ..., :3], entries[1, :3] = False, -1
    padded = view(keys, values, entries)
    expected = reference(query.detach(), keys.detach(), values.detach(), mask[:, 0])
    for found in (Dense()(query, stored, Masks(last, dtype, mask).of(stored)), Dense()(query, padded, Masks(last, dtype, None).of(padded))):
        torch.testing.assert_close(found.detach().double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_rows_in_order_need_no_mask_tensor_and_padded_rows_get_one() -> None:
    kinds = []
    for positions in (torch.tensor([[3]]), torch.tensor([[0, 1, 2], [5, 6, 7]]), torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 2, 1]])):
        cache = NoCache()
        cache.advance(positions)
        shape = positions.shape[0], 1, positions.shape[1], 4
        kinds.append(type(Masks(positions, torch.float32, None).of(cache.append(0, torch.zeros(shape), torch.zeros(shape)))))
    assert kinds == [Everything, Causal, Bias, Bias]


def test_layers_that_hold_the_same_entries_share_one_mask() -> None:
    cache, positions, zeros = NoCache(), torch.tensor([[-1, 0, 1]]), torch.zeros(1, 1, 3, 4)
    cache.advance(positions)
    masks = Masks(positions, torch.float32, None)
    assert masks.of(cache.append(0, zeros, zeros)) is masks.of(cache.append(1, zeros, zeros))
