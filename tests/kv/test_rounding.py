"""Codes of keys and values against the arithmetic written out, and the bound on their error."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmsdk.kv.rounding import Bits, decode, encode

LEVELS = {"int8": 255, "int4": 15, "int2": 3}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(LEVELS)), st.sampled_from([2, -1]), st.integers(1, 9), st.floats(0.01, 1e4), st.integers(0, 1000))
def test_no_error_exceeds_half_a_step_of_its_group(bits: Bits, dim: int, d: int, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(2, 3, 8, 2, d, generator=generator) + torch.randn(d, generator=generator) * 3) * spread
    again = decode(encode(x, dim, bits), bits, d, torch.float32)
    step = (x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)) / LEVELS[bits]
    assert ((again - x).abs() <= step / 2 * (1 + 1e-4) + 1e-6 * x.abs().amax()).all()


def test_codes_are_those_of_the_definition() -> None:
    x = torch.tensor([[-1.0, 0.0, 2.0, 0.4]])
    found = encode(x, -1, "int4")
    assert found.scale.item() == pytest.approx(0.2) and found.low.item() == -1
    low_nibble_first = [0 | 5 << 4, 15 | 7 << 4]
    assert found.codes.tolist() == [low_nibble_first]
    torch.testing.assert_close(decode(found, "int4", 4, torch.float32), x)


@pytest.mark.parametrize("bits", ["int8", "int4", "int2"])
def test_equal_numbers_come_back_exactly(bits: Bits) -> None:
    x = torch.full((1, 5), 3.25)
    assert torch.equal(decode(encode(x, -1, bits), bits, 5, torch.float32), x)


def test_fp8_keeps_the_relative_error_of_e4m3() -> None:
    x = torch.randn(4, 16, 2, 8, generator=torch.Generator().manual_seed(0)) * 300
    again = decode(encode(x, 1, "fp8"), "fp8", 8, torch.float32)
    # three bits behind the point; what is a thousandth of its group's largest is subnormal there
    large = x.abs() > x.abs().amax(1, keepdim=True) / 1000
    assert ((again - x).abs() <= x.abs() / 16 * 1.001)[large].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_size_numbers_have_half_size_scales_and_no_code_out_of_range(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 32, 2, 64, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    found = encode(x, 1, "int8")
    again = decode(found, "int8", 64, dtype)
    span = (x.float().amax(1, keepdim=True) - x.float().amin(1, keepdim=True)) / 255
    assert found.scale.dtype == torch.float16
    assert ((again.float() - x.float()).abs() <= span + x.float().abs() * 2**-8).all()


@pytest.mark.parametrize(("bits", "steps"), [("int8", 255), ("int4", 15), ("int2", 3), ("fp8", 448)])
def test_groups_wider_than_the_largest_scale_come_back_as_far_as_codes_reach(bits: Bits, steps: int) -> None:
    """The largest float16 is 65,504."""
    found = encode(torch.tensor([[0.0, 1e9]], dtype=torch.bfloat16), -1, bits)
    assert found.scale.item() == 65504 and decode(found, bits, 2, torch.float32).tolist() == [[0.0, steps * 65504.0]]


def test_a_scale_between_the_two_largest_is_stored_as_the_largest() -> None:
    """196,432 / 3 is nearest to the last but one, 65,472, from which a step of 2^-10 leads beyond the largest."""
    x = torch.tensor([[-848.0, 195584.0]], dtype=torch.bfloat16)
    found = encode(x, -1, "int2")
    assert found.scale.item() == 65504 and decode(found, "int2", 2, torch.float32).tolist() == [[-848.0, 3 * 65504.0 - 848.0]]


def test_ka_17_a_group_is_scaled_by_itself_alone() -> None:
    x = torch.randn(1, 32, 1, 8, generator=torch.Generator().manual_seed(2))
    before = decode(encode(x, 1, "int8"), "int8", 8, torch.float32)
    encode(torch.full_like(x, 1e30), 1, "int8")
    encode(torch.zeros_like(x), 1, "int8")
    assert torch.equal(decode(encode(x, 1, "int8"), "int8", 8, torch.float32), before)
