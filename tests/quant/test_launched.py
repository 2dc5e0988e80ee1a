"""Matrices in fewer bits by Triton's kernels, which interpret where there is no GPU, against a slow product of what the codes stand for.

The other side runs this file under TRITON_INTERPRET=1.
"""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from mmsdk.kernels.case import Launch
from mmsdk.quant.int4 import Int4, Int4Linear
from mmsdk.quant.int4_layout import LaunchedLayout, NativeLayout, TorchLayout
from mmsdk.quant.int8 import Int8, Int8Linear

# Rows that fill groups and those that do not; one row, several, and more than are read as codes.
SHAPES, ROWS = ((20, 64), (7, 33)), (1, 5, 70)
KINDS = [(kind, shape, rows) for kind in ("int4", "int8") for shape in SHAPES for rows in ROWS]


def given(n: int, k: int, rows: int) -> tuple[Tensor, Tensor, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(n, k, generator=generator) * 0.3, torch.randn(rows, k, generator=generator)
    return weight, x.bfloat16().float(), nn.Parameter(torch.randn(n, generator=generator))


@torch.no_grad()
def told(kind: str, shape: tuple[int, int], rows: int) -> Tensor:
    weight, x, bias = given(*shape, rows)
    if kind == "int8":
        return Int8Linear(Int8.of(weight), bias)(x)
    linear = Int4Linear(Int4.of(weight), bias)
    # where a move to a GPU brings them
    linear.layout = LaunchedLayout(*linear.layout.given())
    return linear(x)


def tell() -> None:
    """The products, and which kernels made them."""
    launched, inner = list[str](), Launch.__call__

    def counted(launch: Launch) -> None:
        launched.append(launch.kernel.fn.__module__.rsplit(".")[-1])
        inner(launch)

    Launch.__call__ = counted  # type: ignore[method-assign]
    found = [told(*one).tolist() for one in KINDS]
    sys.stdout.write(json.dumps([found, launched]) + "\n")


def test_kernels_give_the_product_of_what_the_codes_stand_for() -> None:
    done = subprocess.run(
        [sys.executable, __file__], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found, launched = json.loads(done.stdout.splitlines()[-1])
    for (kind, shape, rows), ours in zip(KINDS, found, strict=True):
        weight, x, bias = given(*shape, rows)
        matrix = Int4.of(weight) if kind == "int4" else Int8.of(weight)
        theirs = x.double() @ matrix.dequantised().double().T + bias.detach().double()
        torch.testing.assert_close(torch.tensor(ours).double(), theirs, rtol=2**-7, atol=float(theirs.abs().max()) * 2**-8)
    assert Counter(launched) == {"gemv": 4, "small_gemm": 4}


@pytest.mark.parametrize("layout", [NativeLayout, TorchLayout, LaunchedLayout])
def test_a_layout_gives_back_what_it_was_given(layout: type[NativeLayout] | type[TorchLayout] | type[LaunchedLayout]) -> None:
    matrix = Int4.of(given(70, 96, 1)[0])
    codes, scales, zeros, columns = layout(matrix.codes, matrix.scales, matrix.zeros, 90).given()
    assert torch.equal(codes, matrix.codes) and torch.equal(scales, matrix.scales) and torch.equal(zeros, matrix.zeros) and columns == 90
    written = layout(matrix.codes, matrix.scales, matrix.zeros, 90).written_out(torch.float32)
    torch.testing.assert_close(written, matrix.dequantised()[:, :90], rtol=1e-6, atol=1e-6)


def test_casting_leaves_what_is_added_alone() -> None:
    matrix = Int4.of(given(20, 64, 1)[0])
    layout = LaunchedLayout(matrix.codes, matrix.scales, matrix.zeros, 64)
    x = torch.randn(2, 64).bfloat16()
    before = layout.product(x)
    assert torch.equal(layout.half().float().product(x), before)


if __name__ == "__main__":
    tell()
