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


WAYS = [pytest.param(True, id="tiles"), pytest.param(False, id="vectors")]


def made(kind: str, weight: Tensor, tiles: bool, bias: Tensor | None = None) -> tuple[matrix.Matrix, Tensor]:
    """A matrix of a kind, and the numbers that it stands for; without tiles, as where the process may not use them."""
    wide = weight.bfloat16()
    kinds = {
        "wide": lambda: (matrix.wide(wide, bias), wide.float()),
        "int8": lambda: eight(weight, bias),
        "int4": lambda: four(weight, 32, bias),
        "int4 by 128": lambda: four(weight, 128, bias),
    }
    found, numbers_of = kinds[kind]()
    found.fields.tiles = tiles
    return found, numbers_of


def times(one: matrix.Matrix, x: Tensor) -> Tensor:
    return matrix.product(one, F.pad(x, (0, one.fields.columns - x.shape[1])))


KINDS = ["wide", "int8", "int4", "int4 by 128"]


@pytest.mark.parametrize("tiles", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_those_of_the_numbers(n: int, k: int, kind: str, tiles: bool) -> None:
    weight, bias = numbers(n, k), numbers(n, seed=2).bfloat16()
    one, stands_for = made(kind, weight, tiles, bias)
    for m in (*range(1, 18), 33):
        x = numbers(m, k, seed=m).bfloat16()
        close(times(one, x), x.double() @ stands_for.double().T + bias.double())


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6 * expected.abs().max().item() + 1e-7)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_row_gives_the_bits_that_it_gives_among_others(kind: str) -> None:
    weight, x = numbers(80, 96), numbers(16, 96, seed=1).bfloat16()
    one, _ = made(kind, weight, False)
    assert torch.equal(times(one, x), torch.cat([times(one, row[None]) for row in x]))
    # of few rows vectors are faster: a row of many goes another way, in an order of its own
    one, _ = made(kind, weight, True)
    for m in range(6, 16):
        assert torch.equal(times(one, x[-m:]), times(one, x)[-m:])


@pytest.mark.parametrize("tiles", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_with_its_row(kind: str, tiles: bool) -> None:
    one, stands_for = made(kind, numbers(37, 70), tiles)
    x = numbers(9, 70, seed=1).bfloat16()
    x[2, 69], x[5, 0] = float("nan"), float("inf")
    found, others = times(one, x), [0, 1, 3, 4, 6, 7, 8]
    assert found[2].isnan().all() and not found[5].isfinite().any()
    close(found[others], x[others].double() @ stands_for.double().T)


def test_weights_beside_the_last_column_do_not_count() -> None:
    """A tile is wider than what is left of a row, and the next row may hold anything."""
    weight, x = numbers(40, 70).bfloat16(), numbers(8, 70, seed=1).bfloat16()
    weight[33] = float("nan")
    found = times(matrix.wide(weight), x)
    assert found[:, 33].isnan().all() and found[:, [*range(33), *range(34, 40)]].isfinite().all()


def test_tiles_are_given_back_as_they_were_found() -> None:
    """torch's own products set them up once, and again only for another shape."""
    weight, x = numbers(96, 128).bfloat16(), numbers(16, 128, seed=1).bfloat16()
    one, packed = matrix.wide(weight), four(numbers(96, 128))
    expected, other = x.float() @ weight.float().T, x.float() @ packed[1].T
    for m in (16, 11, 6, 13):
        for _ in range(2):
            torch.testing.assert_close(torch.mm(x[:m], weight.T).float(), expected[:m], rtol=2**-7, atol=2**-7)
            close(times(one, x[:m]), expected[:m].double())
            torch.testing.assert_close(torch.mm(x[:m], weight.T).float(), expected[:m], rtol=2**-7, atol=2**-7)
            close(times(packed[0], x[:m]), other[:m].double())


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
@pytest.mark.parametrize(("d", "h"), [(32, 6), (64, 2), (96, 10)])
@pytest.mark.parametrize("tiles", WAYS)
def test_attention_reads_the_cache_where_it_lies(t: int, d: int, h: int, tiles: bool) -> None:
    g, m = 2, 2
    dummy = torch.zeros(1, 32).bfloat16()
    sizes = matrix.wide(torch.zeros((h + 2 * g) * d, 32).bfloat16())
    made = layer.Layer.of((sizes, sizes, sizes, sizes), (dummy[0], dummy[0]), (), (h, g, d), 1e-5, 1.0, False)
    made.fields.qkv.tiles = tiles
    room = numbers(2, m, g, t + 9, d, seed=3).bfloat16()
    keys, values = room[0, :, :, 2 : t + 2], room[1, :, :, 2 : t + 2]
    query = numbers(m, h + 2 * g, d, seed=4).bfloat16()[:, :h]
    assert layer.attends(keys, values)
    expected = F.scaled_dot_product_attention(query[:, :, None].double(), keys.double(), values.double(), enable_gqa=True)[:, :, 0]
    torch.testing.assert_close(layer.attend(made, query, keys, values).double(), expected, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("t", [1, 40, 300])
@pytest.mark.parametrize("tiles", WAYS)
def test_attention_to_what_is_no_number_is_none(t: int, tiles: bool) -> None:
    sizes, dummy = matrix.wide(torch.zeros(96, 32).bfloat16()), torch.zeros(32).bfloat16()
    made_of = layer.Layer.of((sizes, sizes, sizes, sizes), (dummy, dummy), (), (1, 1, 32), 1e-5, 1.0, False)
    made_of.fields.qkv.tiles = tiles
    for part in range(3):
        parts = [numbers(2, 1, 1, 32).bfloat16(), numbers(2, 1, t, 32, seed=1).bfloat16(), numbers(2, 1, t, 32, seed=2).bfloat16()]
        parts[part][1, 0, -1, 7] = float("nan")
        found = layer.attend(made_of, parts[0][:, :, 0], *parts[1:])
        assert found[0].isfinite().all() and found[1, 0, 7].isnan()
        assert part == 2 or found[1].isnan().all()


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
