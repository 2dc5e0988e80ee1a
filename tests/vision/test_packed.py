"""Packed rows of different lengths: attention within rows only, what the class token looks at, and the bookkeeping of what was removed."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mmsdk.vision.packed import Rows, attention, filled, jagged_attention, received
from mmsdk.vision.prune import flops
from mmsdk.vision.vit import Activation, Block, ViT, ViTConfig


def rows_of(lengths: list[int], full: int = 9, first: int = 1) -> Rows:
    """Class tokens, and of the patches a random part."""
    generator = torch.Generator().manual_seed(0)
    places = [
        torch.cat((torch.arange(first), first + torch.randperm(full - first, generator=generator)[: n - first].sort().values))
        for n in lengths
    ]
    return Rows(tuple(lengths), torch.cat([row * full + place for row, place in enumerate(places)]), full, first)


def qkv(rows: Rows, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(len(rows.token), 3, 2, 8, generator=generator).to(dtype).unbind(1)
    return query, key, value


LENGTHS = [[5, 9, 9, 2, 5], [4, 4, 4], [9], [1, 9, 1], [3, 2]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("attend", [attention, jagged_attention])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_each_row_attends_to_itself_alone(lengths: list[int], attend: object) -> None:
    assert attend in (attention, jagged_attention)
    rows = rows_of(lengths)
    query, key, value = qkv(rows)
    mixed = attention(query, key, value, rows) if attend is attention else jagged_attention(query, key, value, rows)
    for part, q, k, v in zip(*(x.split(lengths) for x in (mixed, query, key, value)), strict=True):
        weights = (torch.einsum("she,the->hst", q, k) / math.sqrt(8)).softmax(-1)
        torch.testing.assert_close(part, torch.einsum("hst,the->she", weights, v), rtol=1e-5, atol=1e-5)


def test_rows_of_one_length_are_a_plain_batch_bit_for_bit() -> None:
    rows = rows_of([6, 6, 6])
    query, key, value = qkv(rows)
    plain = F.scaled_dot_product_attention(*(x.view(3, 6, 2, 8).transpose(1, 2) for x in (query, key, value)))
    assert torch.equal(attention(query, key, value, rows), plain.transpose(1, 2).reshape(18, 2, 8))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_received_is_the_class_tokens_row_of_the_softmax(lengths: list[int], dtype: torch.dtype) -> None:
    rows = rows_of(lengths)
    query, key, _ = qkv(rows, dtype=dtype)
    query = 8 * query
    found = received(query, key, rows)
    assert found.dtype == torch.float32
    for part, q, k in zip(found.split(lengths), query.double().split(lengths), key.double().split(lengths), strict=True):
        expected = (torch.einsum("he,the->ht", q[0], k) / math.sqrt(8)).softmax(-1).mean(0)
        torch.testing.assert_close(part.double(), expected, rtol=1e-3, atol=1e-5 if dtype == torch.float32 else 2e-2)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_narrowing_keeps_class_tokens_and_numbers(lengths: list[int], seed: int) -> None:
    rows = rows_of(lengths)
    stays = torch.rand(len(rows.token), generator=torch.Generator().manual_seed(seed)) < 0.5
    index, narrowed = rows.narrowed(stays)
    expected = [token for token, stay in zip(rows.token.tolist(), stays.tolist(), strict=True) if stay or token % 9 == 0]
    assert narrowed.token.tolist() == rows.token[index].tolist() == expected
    assert narrowed.lengths == tuple(sum(token // 9 == row for token in expected) for row in range(len(lengths)))
    assert int((~narrowed.patch).sum()) == len(lengths) and narrowed.starts.tolist() == [expected.index(9 * r) for r in range(len(lengths))]
    values = torch.rand(len(expected), 2)
    padded = narrowed.padded(values)
    for row, part in enumerate(values.split(list(narrowed.lengths))):
        assert torch.equal(padded[row, : len(part)], part) and not padded[row, len(part) :].any()


def test_chosen_rows_are_numbered_anew() -> None:
    rows = rows_of([5, 2, 7, 9])
    index, chosen = rows.chosen(torch.tensor([False, True, False, True]))
    assert chosen.lengths == (2, 9) and index.tolist() == [5, 6, *range(14, 23)]
    assert chosen.row.tolist() == [0] * 2 + [1] * 9 and torch.equal(chosen.token % 9, rows.token[index] % 9)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_operations_are_those_that_torch_counts(activation: Activation) -> None:
    """Of matrix products; torch's own counter of fused attention on a processor is left aside for the two products that it stands for."""
    config = ViTConfig(width=32, layers=1, heads=4, hidden=80, grid=3, activation=activation)
    block = ViT(config).blocks[0]
    assert isinstance(block, Block)
    lengths = [7, 3, 9]
    rows = rows_of(lengths)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        x, _, _ = block.attend_rows(torch.randn(19, 32), rows)
        block.feed(x)
    counted = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    linear = sum(n for op, n in counted.items() if "attention" not in op)
    fused = sum(4 * n * n * 32 for n in lengths)
    assert linear + fused == sum(flops(n, 32, 80, gated=activation == "swiglu") for n in lengths)


def test_filling_is_zeros_up_to_a_multiple_and_nothing_reads_it() -> None:
    rows = rows_of([5, 9, 3])
    torch.manual_seed(0)
    block = Block(ViTConfig(width=32, layers=1, heads=2, hidden=80)).requires_grad_(False)
    x = torch.randn(17, 32)
    padded = filled(x)
    assert padded.shape == (32, 32) and torch.equal(padded[:17], x) and not padded[17:].any() and filled(padded) is padded
    padded[17:] = 100.0
    plain = block.attend_rows(x, rows)[0]
    found, *others = block.attend_rows(padded, rows)
    torch.testing.assert_close(block.feed(found)[:17], block.feed(plain))
    assert [len(other) for other in others] == [17, 17] and found.shape == (32, 32)
