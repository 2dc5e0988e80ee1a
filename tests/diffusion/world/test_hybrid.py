"""Hybrid sparse attention against sums written out, and at its limits."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.world.hybrid import Hybrid, head_masses, summed
from mmsdk.errors import InputError


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


QUERY, KEYS, VALUES = drawn(0, 1, 2, 21, 8), drawn(1, 1, 2, 45, 8), drawn(2, 1, 2, 45, 8)


def slowly(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Linear attention by its definition: weights phi(q) . phi(k), normalised."""
    weights = (F.elu(query) + 1) @ (F.elu(keys) + 1).transpose(2, 3)
    return (weights / weights.sum(-1, keepdim=True)) @ values


def test_the_linear_part_is_its_definition_and_linear_in_the_values() -> None:
    hybrid = Hybrid(share=1.0)
    torch.testing.assert_close(hybrid(QUERY, KEYS, VALUES, summed(KEYS, VALUES)), slowly(QUERY, KEYS, VALUES))
    parts = summed(KEYS[:, :, :20], VALUES[:, :, :20]) + summed(KEYS[:, :, 20:], VALUES[:, :, 20:])
    torch.testing.assert_close(parts.read(QUERY), slowly(QUERY, KEYS, VALUES))
    both = summed(KEYS, 2 * VALUES + 3 * VALUES.flip(2)).read(QUERY)
    torch.testing.assert_close(both, 2 * summed(KEYS, VALUES).read(QUERY) + 3 * summed(KEYS, VALUES.flip(2)).read(QUERY))


def test_without_the_linear_part_all_the_mass_is_dense_and_the_share_mixes() -> None:
    sums, dense = summed(KEYS, VALUES), F.scaled_dot_product_attention(QUERY, KEYS, VALUES)
    torch.testing.assert_close(Hybrid(share=0.0, masses=(1.0,), block=16)(QUERY, KEYS, VALUES, sums), dense)
    mixed = Hybrid(share=0.25, masses=(1.0,), block=16)(QUERY, KEYS, VALUES, sums)
    torch.testing.assert_close(mixed, 0.25 * slowly(QUERY, KEYS, VALUES) + 0.75 * dense)


def test_each_head_reads_the_fewest_blocks_that_reach_its_mass() -> None:
    """Against a slow choice of blocks and attention with their mask; blocks of 8, the last of 5."""
    masses = (0.5, 0.95)
    out = Hybrid(0.0, masses, block=8, least=1, most=4)(QUERY, KEYS, VALUES, summed(KEYS, VALUES))
    expected = torch.zeros_like(out)
    for head, mass in enumerate(masses):
        for low in range(0, 21, 8):
            mean = QUERY[0, head, low : low + 8].mean(0)
            blocks = [range(start, min(start + 8, 45)) for start in range(0, 45, 8)]
            found = torch.stack([mean @ KEYS[0, head, list(one)].mean(0) / 8**0.5 + torch.tensor(float(len(one))).log() for one in blocks])
            shares, kept = found.softmax(0), list[int]()
            for block in shares.argsort(descending=True).tolist():
                if len(kept) < 4 and (not kept or float(shares[kept].sum()) < mass):
                    kept.append(block)
            tokens = [token for block in sorted(kept) for token in blocks[block]]
            rows = slice(low, low + 8)
            expected[0, head, rows] = F.scaled_dot_product_attention(QUERY[0, head, rows], KEYS[0, head, tokens], VALUES[0, head, tokens])
    torch.testing.assert_close(out, expected)


def test_heads_that_attend_evenly_are_given_more_mass() -> None:
    keys = drawn(3, 1, 2, 64, 8)
    query = torch.stack((torch.zeros(16, 8), 30 * keys[0, 1, :8].mean(0).expand(16, 8)))[None]
    even, narrow = head_masses(query, keys, block=8)
    assert even == pytest.approx(0.98) and narrow < 0.85


def test_what_is_no_hybrid_is_refused() -> None:
    with pytest.raises(InputError):
        Hybrid(share=1.5)
    with pytest.raises(InputError, match="3 masses for 2 heads"):
        Hybrid(masses=(0.5, 0.5, 0.5))(QUERY, KEYS, VALUES, summed(KEYS, VALUES))
