"""The C++ of a prompt, its products and its attention, against torch in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.kernels.cpu import layer, matrix, prompt
from mmsdk.kernels.cpu.library import library
from mmsdk.quant.int4 import Int4
from mmsdk.quant.int8 import Int8

pytestmark = pytest.mark.skipif(not prompt.ready(), reason=library().state)

GENERATOR = torch.Generator().manual_seed(0)
# On a processor without AMX both go by vectors.
WAYS = [pytest.param(True, id="tiles"), pytest.param(False, id="vectors")]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def made(kind: str, weight: Tensor, bias: Tensor | None = None, tiles: bool = True, in_bytes: bool = False) -> tuple[matrix.Matrix, Tensor]:
    found, stands_for = _made(kind, weight, bias)
    found.fields.tiles, found.fields.bytes = tiles, in_bytes and kind != "wide"
    return found, stands_for


def in_bytes(rows: Tensor, group: int) -> Tensor:
    """Numbers rounded to 127ths of the largest of their group of columns."""
    parts = rows.split(group, 1)
    scales = [part.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127 for part in parts]
    return torch.cat([(part / scale).round() * scale for part, scale in zip(parts, scales, strict=True)], 1)


def _made(kind: str, weight: Tensor, bias: Tensor | None) -> tuple[matrix.Matrix, Tensor]:
    if kind == "wide":
        return matrix.wide(weight.bfloat16(), bias), weight.bfloat16().double()
    if kind == "int8":
        eight = Int8.of(weight)
        return matrix.int8(eight.codes, eight.scales, bias), eight.dequantised().double()
    four = Int4.of(weight, int(kind.removeprefix("int4/")))
    packed = matrix.laid_out(four.codes, four.scales, four.zeros)
    return matrix.int4(*packed, *weight.shape, bias), four.dequantised().double()


def close(found: Tensor, expected: Tensor, steps: int = 1) -> None:
    """To so many roundings to bfloat16, by the largest number."""
    assert (found.double() - expected).abs().max() <= steps * 2**-8 * expected.abs().max()


@pytest.mark.parametrize("tiles", WAYS)
@pytest.mark.parametrize("kind", ["wide", "int8", "int4/32", "int4/64"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 7, 64), (33, 80, 64), (70, 209, 192), (600, 48, 576)])
def test_products_of_many_rows_are_those_of_the_numbers(kind: str, m: int, n: int, k: int, tiles: bool) -> None:
    x, bias = numbers(m, k).bfloat16(), numbers(n).bfloat16()
    one, weight = made(kind, numbers(n, k), bias, tiles)
    assert prompt.takes(one)
    close(prompt.product(one, x), x.double() @ weight.T + bias.double(), steps=2)


@pytest.mark.parametrize("kind", ["int8", "int4/16", "int4/32", "int4/128", "int4/256"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 7, 32), (33, 80, 96), (70, 209, 160), (600, 48, 576)])
def test_products_by_bytes_are_those_of_rounded_numbers(kind: str, m: int, n: int, k: int) -> None:
    """Rows of x by groups of 64 columns, and rows of the matrix too, where it has fewer bits."""
    x, bias = numbers(m, k).bfloat16(), numbers(n).bfloat16()
    x[0, : k // 2] *= 40
    uneven = numbers(n, k)
    uneven[:, k // 2 :] = 0.05 * uneven[:, k // 2 :] + 0.5
    one, weight = made(kind, uneven, bias, tiles=False, in_bytes=True)
    found = prompt.product(one, x)
    stands_for = weight if kind == "int8" else in_bytes(weight, max(64, int(kind.removeprefix("int4/"))))
    close(found, in_bytes(x.double(), 64) @ stands_for.T + bias.double(), steps=2)
    lost = (found.double() - x.double() @ weight.T - bias.double()).norm() / found.double().norm()
    assert 0 < lost < 0.02


def test_what_is_no_number_stays_with_its_row_and_zeros_stay_zeros() -> None:
    x = numbers(40, 160).bfloat16()
    x[3, 7], x[5, 150], x[6] = torch.nan, torch.inf, 0
    one, weight = made("int4/32", numbers(48, 160), tiles=False, in_bytes=True)
    found = prompt.product(one, x)
    assert found[3].isnan().all() and not found[5].isfinite().any() and (found[6] == 0).all()
    sound = [row for row in range(40) if row not in (3, 5)]
    close(found[sound], in_bytes(x[sound].double(), 64) @ in_bytes(weight, 64).T, steps=2)
    assert torch.equal(prompt.product(one, x[10:27]), found[10:27])


@pytest.mark.parametrize("way", ["tiles", "vectors", "bytes"])
@pytest.mark.parametrize("kind", ["wide", "int8", "int4/32"])
@pytest.mark.parametrize(("normed", "gelu"), [(False, True), (True, False)])
def test_a_layer_is_its_formula(kind: str, normed: bool, gelu: bool, way: str) -> None:
    """By bytes each of the products is off by a hundredth."""
    steps = 3 if way != "bytes" or kind == "wide" else 9
    m, width, h, g, d, inner, eps, scale = 37, 96, 6, 2, 16, 160, 1e-5, 0.5
    shapes = {"qkv": ((h + 2 * g) * d, width), "o": (width, h * d), "gate_up": (2 * inner, width), "down": (width, inner)}
    both = {name: made(kind, numbers(*shape) * 0.2, None, way == "tiles", way == "bytes") for name, shape in shapes.items()}
    norms = tuple((1 + 0.3 * numbers(width)).bfloat16() for _ in range(2))
    heads = tuple((1 + 0.3 * numbers(d)).bfloat16() for _ in range(2)) if normed else ()
    qkv, o, gate_up, down = (both[name][0] for name in shapes)
    one = layer.Layer.of((qkv, o, gate_up, down), norms, heads, (h, g, d), eps, scale, gelu)
    assert prompt.fits(one)
    wide = {name: weight for name, (_, weight) in both.items()}
    x, seen, angles = numbers(m, width).bfloat16(), numbers(m, h * d).bfloat16(), numbers(m, d // 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    stream = x.double() + seen.double() @ wide["o"].T
    gate, up = (F.rms_norm(stream, (width,), norms[1].double(), eps) @ wide["gate_up"].T).chunk(2, -1)
    act = F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)
    close(prompt.finish(one, x, seen), stream + (act * up) @ wide["down"].T, steps=steps)

    heads_of = (F.rms_norm(x.double(), (width,), norms[0].double(), eps) @ wide["qkv"].T).view(m, -1, d)
    turned = heads_of[:, : h + g]
    if normed:
        by = torch.cat([norm.double().expand(count, d) for norm, count in zip(heads, (h, g), strict=True)])
        turned = F.rms_norm(turned, (d,), None, eps) * by
    left, right = turned.chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    turned = torch.cat((left * c - right * s, right * c + left * s), -1)
    turned[:, :h] *= scale
    close(prompt.project(one, x, cos, sin), torch.cat((turned, heads_of[:, h + g :]), 1), steps=steps)


@torch.no_grad()
@pytest.mark.parametrize("tiles", WAYS)
@pytest.mark.parametrize(("b", "s", "behind", "last"), [(1, 37, 0, 0), (2, 19, 0, 1), (2, 40, 13, 0), (1, 18, 45, 18)])
def test_layers_in_one_call_are_the_layers_one_by_one(b: int, s: int, behind: int, last: int, tiles: bool) -> None:
    width, h, g, d, inner, m, t = 96, 6, 2, 16, 160, b * s, behind + s
    shapes = {"qkv": ((h + 2 * g) * d, width), "o": (width, h * d), "gate_up": (2 * inner, width), "down": (width, inner)}
    layers = []
    for _ in range(3):
        qkv, o, gate_up, down = (made("wide", numbers(*shape) * 0.2, tiles=tiles)[0] for shape in shapes.values())
        norms = tuple((1 + 0.3 * numbers(width)).bfloat16() for _ in range(2))
        layers.append(layer.Layer.of((qkv, o, gate_up, down), norms, (), (h, g, d), 1e-5, 1.0, False))
    x, angles = numbers(b, s, width).bfloat16(), numbers(m, d // 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    memory = numbers(2, len(layers), b, g, t + 2, d).bfloat16()
    keys, values = (list(one) for one in memory.clone())
    row, head, token, _ = keys[0].stride()
    places = (torch.arange(b)[:, None] * row + torch.arange(behind, t) * token).flatten()
    where = prompt.Memory(keys, values, places, (row, head, token), behind)
    assert prompt.reads(where)
    found, before = prompt.read(layers, x, cos, sin, where, last)
    for one, kept, other, was in zip(layers, keys, values, memory.transpose(0, 1), strict=True):
        if one is layers[-1]:
            assert torch.equal(before, x)
        query, key, value = prompt.project(one, x.flatten(0, 1), cos, sin).unflatten(0, (b, s)).transpose(1, 2).split((h, g, g), 1)
        was[0][:, :, behind:t], was[1][:, :, behind:t] = key, value
        assert torch.equal(kept, was[0]) and torch.equal(other, was[1])
        seen = prompt.attend(query, was[0][:, :, :t], was[1][:, :, :t], behind, tiles=tiles)
        x = prompt.finish(one, x.flatten(0, 1), seen.transpose(1, 2).reshape(m, -1)).view(b, s, width)
    close(found, x[:, -last:].double(), steps=2)


def laid(b: int, g: int, share: int, s: int, t: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries as they come from a product, keys in a memory with room behind, whatever stands there, and values token by token."""
    qkv = numbers(b, s, g * share + 2 * g, d).bfloat16()
    keys, values = numbers(b, g, t + 3, d).bfloat16(), numbers(b, t + 3, g, d).bfloat16()
    keys[:, :, t:] = values[:, t:] = float("nan")
    return qkv[:, :, : g * share].transpose(1, 2), keys[:, :, :t], values[:, :t].transpose(1, 2)


SIZES = [
    (1, 3, 3, 64, 64, 64),
    (2, 2, 1, 5, 5, 80),
    (1, 1, 24, 33, 70, 128),
    (2, 2, 2, 70, 70, 64),
    (1, 2, 7, 17, 300, 64),
    (1, 1, 1, 2, 2, 8),
    (1, 1, 2, 40, 290, 256),
]


@torch.no_grad()
@pytest.mark.parametrize("tiles", WAYS)
@pytest.mark.parametrize(("b", "g", "share", "s", "t", "d"), SIZES)
@pytest.mark.parametrize("what", ["before", "everything", "window", "anything"])
def test_ka_12_attention_is_softmax(what: str, b: int, g: int, share: int, s: int, t: int, d: int, tiles: bool) -> None:
    query, keys, values = laid(b, g, share, s, t, d)
    late = torch.arange(t) - torch.arange(s)[:, None] - (t - s)
    rules = {"before": late <= 0, "everything": late > -t, "window": (late <= 0) & (late > -7), "anything": numbers(s, t) > 1}
    seen = rules[what].expand(b, 1, s, t).clone()
    if what == "anything":
        seen[-1] = numbers(s, t) > 1
    expected = F.scaled_dot_product_attention(query.double(), keys.double(), values.double(), seen, enable_gqa=True).nan_to_num(0)
    biases = (torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill(~seen, -torch.inf),) if what in ("window", "anything") else ()
    assert prompt.attends(query, keys, values)
    found = prompt.attend(query, keys, values, t - s if what == "before" else t, biases, tiles)
    # shares are rounded, and so is their sum with the values
    assert (found.double() - expected).abs().max() <= 2**-7 * max(1.0, float(expected.abs().max()))
    assert bool((found[(~seen.any(-1)).expand(b, g * share, s)] == 0).all())


@torch.no_grad()
@pytest.mark.parametrize("share", [1, 2, 3, 24])
def test_attention_of_every_length_up_to_two_blocks(share: int) -> None:
    for s in range(2, 71, 3):
        query, keys, values = laid(1, 1, share, s, s + s % 4, 64)
        behind = s % 4
        expected = F.scaled_dot_product_attention(
            query.double(), keys.double(), values.double(), torch.ones(s, s + behind).tril(behind) > 0, enable_gqa=True
        )
        close(prompt.attend(query, keys, values, behind), expected, steps=2)


@torch.no_grad()
def test_what_is_no_number_stays_none() -> None:
    query, keys, values = laid(1, 1, 2, 40, 40, 64)
    query[0, 1, 7, 3] = float("nan")
    found = prompt.attend(query, keys, values, 0).isnan()
    assert found[0, 1, 7].all() and int(found.sum()) == 64
    keys[0, 0, 20] = float("nan")
    found = prompt.attend(query, keys, values, 0).isnan().all(-1)
    assert found[0, :, 20:].all() and not found[0, 0, :20].any()
    x = numbers(40, 64).bfloat16()
    x[5, 1] = float("inf")
    x[9, 1] = float("nan")
    one, _ = made("wide", numbers(48, 64))
    assert (~prompt.product(one, x).isfinite()).all(1).nonzero().flatten().tolist() == [5, 9]


def test_gradients_wide_numbers_and_single_queries_are_for_others() -> None:
    query, keys, values = laid(1, 1, 1, 4, 4, 64)
    assert not prompt.attends(query, keys, values)
    with torch.no_grad():
        assert prompt.attends(query, keys, values) and not prompt.attends(query[:, :, :1], keys, values)
        assert not prompt.attends(query.float(), keys.float(), values.float())
        assert not prompt.attends(query, keys, values[..., :32])
