"""The C++ of a vision block against its formula in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.kernels.cpu import block, matrix, prompt
from mmsdk.kernels.cpu.library import library

pytestmark = pytest.mark.skipif(not prompt.ready(), reason=library().state)

GENERATOR = torch.Generator().manual_seed(0)
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).bfloat16()


def close(found: Tensor, expected: Tensor, steps: int) -> None:
    """To so many roundings to bfloat16, by the largest number."""
    assert (found.double() - expected).abs().max() <= steps * 2**-8 * expected.abs().max()


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("m", "width", "inner"), [(1, 32, 64), (33, 96, 160), (530, 64, 96)])
def test_a_block_is_its_formula(activation: str, scaled: bool, m: int, width: int, inner: int, tiles: bool) -> None:
    shapes = {"qkv": (3 * width, width), "o": (width, width), "up": (inner, width), "down": (width, inner)}
    weights = {name: (numbers(*shape) * 0.2, numbers(shape[0])) for name, shape in shapes.items()}
    vectors = [numbers(width) for _ in range(6 if scaled else 4)]
    linears = tuple(matrix.wide(*pair) for pair in weights.values())
    for one in linears:
        one.fields.tiles = tiles
    assert block.fits(width, inner, activation)
    made = block.Block.of((linears[0], linears[1], linears[2], linears[3]), vectors, 1e-6, activation)
    # a mean far from 0 is what a norm takes away
    x, seen = numbers(m, width) + 3, numbers(m, width)
    wide = {name: (weight.double(), bias.double()) for name, (weight, bias) in weights.items()}
    norm1, bias1, norm2, bias2, *scales = (vector.double() for vector in vectors)
    first, second = scales or (torch.ones(width).double(), torch.ones(width).double())

    close(block.project(made, x), F.linear(F.layer_norm(x.double(), (width,), norm1, bias1, 1e-6), *wide["qkv"]), 3)
    close(block.add(made, x, seen), x.double() + first * F.linear(seen.double(), *wide["o"]), 2)
    hidden = ACTIVATIONS[activation](F.linear(F.layer_norm(x.double(), (width,), norm2, bias2, 1e-6), *wide["up"]))
    close(block.feed(made, x), x.double() + second * F.linear(hidden, *wide["down"]), 3)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_an_activation_is_right_at_both_ends_and_keeps_what_is_no_number(activation: str) -> None:
    width, ends = 32, torch.tensor([-1e4, -40.0, -6.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 6.0, 40.0, 1e4, float("nan")]).bfloat16()
    nothing, one = torch.zeros(width).bfloat16(), torch.eye(width).bfloat16()
    up = torch.cat((ends, torch.zeros(width - len(ends)))).bfloat16()
    # the MLP's bias alone is what its activation sees
    linears = [matrix.wide(torch.zeros(3 * width, width).bfloat16(), torch.zeros(3 * width).bfloat16()), matrix.wide(one, nothing)]
    linears += [matrix.wide(torch.zeros_like(one), up), matrix.wide(one, nothing)]
    made = block.Block.of((linears[0], linears[1], linears[2], linears[3]), [one[0], nothing, one[0], nothing], 1e-6, activation)
    found = block.feed(made, nothing[None])[0]
    # a number that is none meets a row of zeros at every output
    assert bool(found.isnan().all())
    finite = up.clone()
    finite[len(ends) - 1] = 0
    linears[2] = matrix.wide(torch.zeros_like(one), finite)
    made = block.Block.of((linears[0], linears[1], linears[2], linears[3]), [one[0], nothing, one[0], nothing], 1e-6, activation)
    expected = ACTIVATIONS[activation](finite.double())
    assert (block.feed(made, nothing[None])[0].double() - expected).abs().max() <= 2**-8 * 1e4
    small = finite.abs() <= 40
    assert ((block.feed(made, nothing[None])[0].double() - expected).abs()[small] <= 2**-7 * expected.abs()[small] + 1e-4).all()


def test_what_is_no_whole_tile_is_not_taken() -> None:
    assert not block.fits(1152, 4304, "gelu_tanh")
    assert not block.fits(40, 64, "gelu")
    assert not block.fits(64, 64, "swiglu")
