"""The C++ of a decode step, and of what a prompt does between products, against torch in float64, piece by piece."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.kernels.cpu import layer, matrix, rows
from mmsdk.kernels.cpu.library import compiled, library
from mmsdk.quant.int4 import Int4
from mmsdk.quant.int8 import Int8

pytestmark = pytest.mark.skipif(library().functions is None, reason=library().state)

SHAPES = [(1, 2), (7, 34), (16, 32), (80, 96), (129, 576)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def four(weight: Tensor, group: int = 32, bias: Tensor | None = None) -> tuple[matrix.Matrix, Tensor]:
    rounded = Int4.of(weight, group)
    packed = matrix.laid_out(rounded.codes, rounded.scales, rounded.zeros)
    return matrix.int4(*packed, len(weight), weight.shape[1], bias), rounded.dequantised()


def eight(weight: Tensor, bias: Tensor | None = None) -> tuple[matrix.Matrix, Tensor]:
    rounded = Int8.of(weight)
    codes = F.pad(rounded.codes, (0, -weight.shape[1] % 16))
    return matrix.int8(codes, rounded.scales, bias), rounded.dequantised()


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 9])
def test_products_are_those_of_the_numbers(n: int, k: int, m: int) -> None:
    weight, x, bias = numbers(n, k), numbers(m, k, seed=1).bfloat16(), numbers(n, seed=2).bfloat16()
    expected = x.double() @ weight.bfloat16().double().T + bias.double()
    close(matrix.product(matrix.wide(weight.bfloat16(), bias), x), expected)
    for group in (32, 64):
        packed, dequantised = four(weight, group, bias)
        close(matrix.product(packed, x), x.double() @ dequantised.double().T + bias.double())
    packed, dequantised = eight(weight, bias)
    close(matrix.product(packed, F.pad(x, (0, -k % 16))), x.double() @ dequantised.double().T + bias.double())


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6 * expected.abs().max().item() + 1e-7)


@pytest.mark.parametrize("kind", ["wide", "int4", "int8"])
def test_a_row_alone_gives_the_bits_that_it_gives_among_others(kind: str) -> None:
    weight, x = numbers(80, 96), numbers(9, 96, seed=1).bfloat16()
    made = {"wide": matrix.wide(weight.bfloat16()), "int4": four(weight)[0], "int8": eight(weight)[0]}[kind]
    alone = torch.cat([matrix.product(made, row[None]) for row in x])
    assert torch.equal(matrix.product(made, x), alone)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int4_is_laid_out_and_written_out_again(n: int, k: int) -> None:
    rounded = Int4.of(numbers(n, k))
    packed, scales = matrix.laid_out(rounded.codes, rounded.scales, rounded.zeros)
    assert torch.equal(matrix.codes_of(packed)[:n], rounded.codes)
    found = matrix.written_out(matrix.int4(packed, scales, n, k))
    # one rounding of code * scale + zero, which the reference rounds in float32 first
    torch.testing.assert_close(found.float(), rounded.dequantised(), rtol=2**-8, atol=1e-6)


def slow_layer(x: Tensor, seen: Tensor, weights: dict[str, Tensor], eps: float, gelu: bool) -> Tensor:
    stream = x.double() + seen.double() @ weights["o"].double().T
    normed = stream / (stream.square().mean(-1, keepdim=True) + eps).sqrt() * weights["norm2"].double()
    gate, up = (normed @ weights["gate_up"].double().T).chunk(2, -1)
    active = F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)
    return stream + (active * up) @ weights["down"].double().T


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("m", [1, 3])
def test_a_layer_is_its_formula(gelu: bool, normed: bool, m: int) -> None:
    width, h, g, d, inner, eps = 96, 4, 2, 32, 80, 1e-5
    shapes = {"qkv": ((h + 2 * g) * d, width), "o": (width, h * d), "gate_up": (2 * inner, width), "down": (width, inner)}
    weights = {name: numbers(*shape, seed=len(name)).bfloat16() for name, shape in shapes.items()}
    weights |= {f"norm{i}": 1 + numbers(width, seed=i).bfloat16() for i in (1, 2)}
    heads = tuple(1 + numbers(d, seed=i).bfloat16() for i in (7, 8)) if normed else ()
    made = layer.Layer.of(
        tuple(matrix.wide(weights[name]) for name in shapes), (weights["norm1"], weights["norm2"]), heads, (h, g, d), eps, 0.5, gelu
    )
    x, seen = numbers(m, width, seed=11).bfloat16(), numbers(m, h * d, seed=12).bfloat16()
    expected = slow_layer(x, seen, weights, eps, gelu)
    # what goes into a product is rounded to bfloat16: an error goes by the largest terms of its sum
    torch.testing.assert_close(layer.finish(made, x, seen).double(), expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()))

    angles = numbers(m, d // 2, seed=13)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    stream = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weights["norm1"].double()
    qkv = (stream @ weights["qkv"].double().T).view(m, -1, d)
    turned = qkv[:, : h + g]
    if normed:
        scale = torch.cat((heads[0].double().expand(h, d), heads[1].double().expand(g, d)))
        turned = turned / (turned.square().mean(-1, keepdim=True) + eps).sqrt() * scale
    left, right = turned.chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    turned = torch.cat((left * c - right * s, right * c + left * s), -1)
    expected = torch.cat((turned[:, :h] * 0.5, turned[:, h:], qkv[:, h + g :]), 1)
    found = layer.project(made, x, cos, sin).double()
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-8 * float(expected.abs().max()))


@pytest.mark.parametrize("t", [1, 15, 256, 700])
@pytest.mark.parametrize("d", [32, 64, 96])
def test_attention_reads_the_cache_where_it_lies(t: int, d: int) -> None:
    h, g, m = 6, 2, 2
    dummy = torch.zeros(1, 32).bfloat16()
    sizes = matrix.wide(torch.zeros((h + 2 * g) * d, 32).bfloat16())
    made = layer.Layer.of((sizes, sizes, sizes, sizes), (dummy[0], dummy[0]), (), (h, g, d), 1e-5, 1.0, False)
    room = numbers(2, m, g, t + 9, d, seed=3).bfloat16()
    keys, values = room[0, :, :, 2 : t + 2], room[1, :, :, 2 : t + 2]
    query = numbers(m, h + 2 * g, d, seed=4).bfloat16()[:, :h]
    assert layer.attends(keys, values)
    expected = F.scaled_dot_product_attention(query[:, :, None].double(), keys.double(), values.double(), enable_gqa=True)[:, :, 0]
    torch.testing.assert_close(layer.attend(made, query, keys, values).double(), expected, rtol=2**-7, atol=2**-9)


@torch.no_grad()
@pytest.mark.parametrize(("b", "s", "f"), [(1, 1, 16), (2, 7, 24), (3, 33, 5)])
def test_what_lies_between_products_is_its_formula(b: int, s: int, f: int) -> None:
    x, weight = (numbers(b, s, 4 * f, seed=5) * 20).bfloat16(), numbers(4 * f, seed=6).bfloat16()
    assert rows.here(x)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    once(rows.normalised(x, weight, 1e-5), expected)
    gate, up = wide.chunk(2, -1)
    once(rows.gated(x, gelu=False), F.silu(gate) * up)
    once(rows.gated(x, gelu=True), F.gelu(gate, approximate="tanh") * up)
    angles = numbers(b, s, f, seed=7)
    cos, sin, heads = angles.cos().bfloat16(), angles.sin().bfloat16(), numbers(b, s, 3, 2 * f, seed=8).bfloat16()
    left, right = heads[:, :, :2].double().chunk(2, -1)
    c, n = cos.double()[:, :, None], sin.double()[:, :, None]
    once(rows.turned(heads, 2, cos, sin), torch.cat((left * c - right * n, right * c + left * n), -1).transpose(1, 2))


def once(found: Tensor, expected: Tensor) -> None:
    """Rounded once; where terms cancel, an error goes by them."""
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6 * float(expected.abs().max()) + 1e-6)


def test_the_process_keeps_its_denormal_numbers() -> None:
    assert library().functions is not None
    assert (torch.tensor([1e-40]) * 0.5).item() > 0 and 1e-310 * 0.5 > 0


def test_it_is_compiled_once_and_whole(tmp_path: Path) -> None:
    first = compiled("g++", tmp_path)
    stamp = first.stat().st_mtime_ns
    assert compiled("g++", tmp_path) == first and first.stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    with pytest.raises(subprocess.CalledProcessError):
        compiled("false", tmp_path)
    first.chmod(0o777)
    with pytest.raises(PermissionError, match="can be written by others"):
        compiled("g++", tmp_path)
