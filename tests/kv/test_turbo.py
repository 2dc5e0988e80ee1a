"""TurboQuant's rounding against its published errors, and what a rotation may not change."""

import math

import pytest
import torch

from mmsdk.kernels.turbo import centroids, restored, rotated, rotation, rounded
from mmsdk.kv.rounding import Bits, decode, encode

# Errors of one to four bits as shares of the squared length, as published.
PUBLISHED = {1: 0.36, 2: 0.117, 3: 0.03, 4: 0.009}


@pytest.mark.parametrize("bits", PUBLISHED)
def test_the_error_is_the_published_one_whatever_is_rounded(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(400, 64, generator=generator)
    spiked = plain + 40 * (torch.arange(64) == 5)
    for x in (plain, spiked):
        error = (restored(*rounded(x, bits), bits) - x).square().sum(-1) / x.square().sum(-1)
        assert error.mean().item() == pytest.approx(PUBLISHED[bits], rel=0.2)


@pytest.mark.parametrize("bits", PUBLISHED)
def test_each_centroid_is_the_mean_of_what_it_stands_for(bits: int) -> None:
    """Lloyd's condition for the normal distribution, by its closed form."""
    table = centroids(bits).double()
    edges = torch.cat((torch.tensor([-torch.inf]).double(), (table[1:] + table[:-1]) / 2, torch.tensor([torch.inf]).double()))
    density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
    share = torch.special.ndtr(edges).diff()
    torch.testing.assert_close(table, -density.diff() / share, rtol=0, atol=2e-3)


def test_the_rotation_is_one_and_keeps_lengths_and_angles() -> None:
    turned = rotation(48)
    torch.testing.assert_close(turned @ turned.T, torch.eye(48), atol=1e-6, rtol=0)
    assert rotation(48) is turned
    a, b = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close((rotated(a) * rotated(b)).sum(-1), (a * b).sum(-1))


@pytest.mark.parametrize("bits", ["turbo4", "turbo2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ka_17_each_token_is_rounded_by_itself_and_zero_stays_zero(bits: Bits, dtype: torch.dtype) -> None:
    x = torch.randn(3, 32, 2, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[1, 4] = 0
    found = encode(x, 4, bits)
    assert found.codes.shape[-1] == 64 * int(bits[-1]) // 8 and found.scale.shape == (3, 32, 2, 1)
    again = decode(found, bits, 64, dtype)
    assert again.dtype == dtype and not again[1, 4].any()
    torch.testing.assert_close(decode(encode(x[2:, 7:8], 4, bits), bits, 64, dtype), again[2:, 7:8])
