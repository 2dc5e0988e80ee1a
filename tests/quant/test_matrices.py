"""int4 and int8 matrices: torch's kernels against a slow product of what the codes stand for, and that against its bounds."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn

from mmsdk.quant.int4 import Int4, Int4Linear
from mmsdk.quant.int8 import Int8, Int8Embedding, Int8Linear
from mmsdk.weights.gguf_blocks import as_int4

# Rows and columns that fill tiles and groups, and ones that do not; the widest has more rows than are laid out at a time.
SHAPES = [(64, 64), (7, 33), (80, 40), (130, 96), (1100, 64)]


def weights(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.3


def product(x: Tensor, numbers: Tensor) -> Tensor:
    """In float64, of what the kernel is given: x in bfloat16."""
    return x.bfloat16().double() @ numbers.double().T


def close(found: Tensor, expected: Tensor) -> None:
    """To the last place of bfloat16, and what sums of terms this large lose."""
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=float(expected.abs().max()) * 2**-8)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [(1,), (2, 3), (5, 40), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernels_give_the_product_of_what_the_codes_stand_for(n: int, k: int, rows: tuple[int, ...], dtype: torch.dtype) -> None:
    weight, bias = weights(n, k), nn.Parameter(torch.randn(n).to(dtype))
    x = torch.randn(*rows, k).bfloat16().to(dtype)
    four, eight = Int4.of(weight), Int8.of(weight)
    for matrix, linear in ((four, Int4Linear(four, bias)), (eight, Int8Linear(eight, bias))):
        found, plain = linear(x), type(linear)(matrix, None)(x)
        assert found.dtype == dtype and found.shape == (*rows, n)
        close(plain, product(x.reshape(-1, k), matrix.dequantised()).view(*rows, n))
        close(matrix(x), product(x.reshape(-1, k), matrix.dequantised()).view(*rows, n))
        torch.testing.assert_close(found, plain + bias)


def test_rows_of_a_batch_that_lie_apart_or_begin_anywhere_are_read_as_they_are() -> None:
    four, eight = Int4.of(weights(64, 64)), Int8.of(weights(64, 64))
    wide = torch.randn(3, 5, 65).bfloat16()
    for matrix, linear in ((four, Int4Linear(four, None)), (eight, Int8Linear(eight, None))):
        for x in (wide[:, -1, :64], wide[0, 1:2, 1:], wide.flatten()[3:67][None]):
            close(linear(x), product(x, matrix.dequantised()))


def test_casting_the_model_leaves_the_scales_alone() -> None:
    four, eight = Int4.of(weights(64, 64)), Int8.of(weights(64, 64) * 1e-4)
    x = torch.randn(2, 64).bfloat16()
    for linear in (Int4Linear(four, None), Int8Linear(eight, None)):
        before = linear(x)
        assert torch.equal(linear.half().float()(x), before)
        close(linear.double()(x.double()), before.double())


def test_many_rows_and_few_agree() -> None:
    for matrix, kind in ((Int4.of(weights(130, 70)), Int4Linear), (Int8.of(weights(130, 70)), Int8Linear)):
        linear, x = kind(matrix, None), torch.randn(300, 70)  # type: ignore[arg-type]  # each kind meets its own matrix
        few = torch.cat([linear(part) for part in x.split(4)])
        torch.testing.assert_close(linear(x), few, rtol=2**-6, atol=float(few.abs().max()) * 2**-8)


def test_rounding_stays_within_half_a_step() -> None:
    weight = weights(40, 96)
    four, eight = Int4.of(weight), Int8.of(weight)
    step = four.scales.float().repeat_interleave(32, 1)
    # rounded to bfloat16, a scale may fall short by 2**-9 of its 15 steps, and a zero by as much of itself
    assert ((four.dequantised() - weight).abs() <= 0.5 * step + 15 * 2**-9 * step + 2**-9 * weight.abs().max()).all()
    assert ((eight.dequantised() - weight).abs() <= (0.5 + 127 * 2**-9) * eight.scales.float()[:, None]).all()
    assert (eight.dequantised() - weight).square().mean() < (four.dequantised() - weight).square().mean() / 50


def test_it_is_as_near_as_llama_cpps_own_rounding() -> None:
    weight = weights(64, 256)
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), Kind.Q4_1), Kind.Q4_1))
    ours = Int4.of(weight).dequantised()
    assert (ours - weight).square().mean() <= 1.02 * (theirs - weight).square().mean()


@pytest.mark.parametrize(("columns", "group", "groups"), [(33, 16, 3), (32, 16, 2), (5, 32, 1), (33, 32, 2)])
def test_qs_01_02_groups_are_counted_up_and_a_short_one_is_padded(columns: int, group: int, groups: int) -> None:
    weight = weights(6, columns)
    matrix = Int4.of(weight, group)
    assert matrix.scales.shape == matrix.zeros.shape == (6, groups) and matrix.dequantised().shape == (6, columns)
    last = weight[:, (groups - 1) * group :]
    # the padding does not widen the last group
    torch.testing.assert_close(matrix.scales[:, -1].float(), (last.amax(1) - last.amin(1)) / 15, rtol=2**-8, atol=0)
    if group == 32:
        close(Int4Linear(matrix, None)(torch.ones(1, columns)), matrix.dequantised().sum(1)[None].double())


def test_qs_03_rows_of_zeros_and_of_a_constant_come_back() -> None:
    weight = torch.stack((torch.zeros(64), torch.full((64,), 0.75), torch.full((64,), -3.0), torch.linspace(-1, 1, 64)))
    four, eight = Int4.of(weight), Int8.of(weight)
    assert four.finite and eight.finite
    assert torch.equal(four.dequantised()[:3], weight[:3]) and torch.equal(eight.dequantised()[0], weight[0])
    # a constant is the greatest code of its row, so that it comes back as its scale does
    torch.testing.assert_close(eight.dequantised()[1:3], weight[1:3], rtol=2**-8, atol=0)
    for linear in (Int4Linear(four, None), Int8Linear(eight, None)):
        assert torch.equal(linear(torch.randn(3, 64))[:, 0], torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_qs_04_saved_and_loaded_it_is_the_same(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = weights(20, 70).to(dtype)
    four, eight = Int4.of(weight), Int8.of(weight)
    tensors = {"codes": four.codes, "scales": four.scales, "zeros": four.zeros, "codes8": eight.codes, "scales8": eight.scales}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    read = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert torch.equal(Int4(read["codes"], read["scales"], read["zeros"], 70).dequantised(), four.dequantised())
    assert torch.equal(Int8(read["codes8"], read["scales8"]).dequantised(), eight.dequantised())
    # the dtype that it came in does not matter beyond its own rounding
    assert torch.equal(four.dequantised(), Int4.of(weight.float()).dequantised())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_noticed(wrong: float) -> None:
    weight = weights(4, 64)
    weight[2, 40] = wrong
    assert not Int4.of(weight).finite and not Int8.of(weight).finite


def test_golden_blocks_written_by_hand() -> None:
    """ggml's layout: half-precision scale (and minimum), then 16 bytes whose low halves are values 0 to 15, the high ones 16 to 31."""
    ramp = bytes((15 - j) << 4 | j for j in range(16))
    first = as_int4(blocks(np.float16(0.5).tobytes() + ramp), Kind.Q4_0)
    second = as_int4(blocks(np.float16(0.25).tobytes() + np.float16(-2.0).tobytes() + ramp), Kind.Q4_1)
    assert first is not None and second is not None
    up, down = torch.arange(16.0), torch.arange(15.0, -1, -1)
    assert torch.equal(first.dequantised()[0], 0.5 * (torch.cat((up, down)) - 8))
    assert torch.equal(second.dequantised()[0], 0.25 * torch.cat((up, down)) - 2)
    assert as_int4(blocks(bytes(34)), Kind.Q8_0) is None and as_int4(blocks(bytes(4)), Kind.F32) is None


def blocks(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)[None]


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_blocks_are_taken_over_code_by_code(kind: Kind) -> None:
    raw = gguf.quants.quantize(weights(70, 128).numpy(), kind)
    matrix = as_int4(torch.from_numpy(raw), kind)
    assert matrix is not None
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    torch.testing.assert_close(matrix.dequantised(), expected, rtol=1e-6, atol=1e-6)
    # the kernel's scales are bfloat16, those of the file half precision
    x = torch.randn(2, 128).bfloat16()
    exact = product(x, expected)
    torch.testing.assert_close(Int4Linear(matrix, None)(x).double(), exact, rtol=2**-6, atol=float(exact.abs().max()) * 2**-7)


def test_an_embedding_looks_up_the_rows_that_the_head_multiplies_by() -> None:
    matrix = Int8.of(weights(50, 24))
    table = Int8Linear(matrix, None)
    embedding = Int8Embedding(table, torch.float32)
    ids = torch.tensor([[0, 49], [7, 7]])
    assert torch.equal(embedding(ids), matrix.dequantised()[ids])
    assert embedding.bfloat16()(ids).dtype == torch.bfloat16
    torch.testing.assert_close(embedding(ids).float(), matrix.dequantised()[ids], rtol=2**-8, atol=0)
