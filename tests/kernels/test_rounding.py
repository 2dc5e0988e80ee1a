"""e4m3 by its bits against torch's own, all 256 codes, and codes packed and unpacked."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from mmsdk.kernels._triton import jit, tl
from mmsdk.kernels.rounding import LEVELS, e4m3_of, from_e4m3, pack, plain, unpack

# Numbers to be written: all that e4m3 has, what lies half way between two, a little beside it, and what is beyond.
KNOWN = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@jit
def _read(codes: tl.tensor, out: tl.tensor, short: tl.tensor) -> None:
    place = tl.arange(0, 256)
    code = tl.load(codes + place)
    tl.store(out + place, from_e4m3(code))
    tl.store(short + place, plain(code, True, tl.bfloat16))


@jit
def _write(numbers: tl.tensor, out: tl.tensor, count: tl.tensor) -> None:
    place = tl.arange(0, 2048)
    x = tl.load(numbers + place, mask=place < count, other=0.0)
    tl.store(out + place, e4m3_of(tl.minimum(tl.maximum(x, -448.0), 448.0)), mask=place < count)


def numbers() -> Tensor:
    finite = KNOWN[KNOWN.isfinite()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    return torch.cat((finite, middle, middle * (1 + 2**-20), middle * (1 - 2**-20), finite * 1e-7, torch.tensor([1e9, -1e9])))


def tell() -> None:
    """In a process whose Triton interprets."""
    read, short, x = torch.full((256,), torch.nan), torch.full((256,), torch.nan, dtype=torch.bfloat16), numbers()
    written = torch.full((len(x),), 99, dtype=torch.uint8)
    _read[(1,)](torch.arange(256, dtype=torch.uint8), read, short)
    _write[(1,)](x, written, len(x))
    sys.stdout.write(json.dumps([read.view(torch.int32).tolist(), short.float().view(torch.int32).tolist(), written.tolist()]))


def test_e4m3_by_its_bits_is_torchs() -> None:
    done = subprocess.run(
        [sys.executable, __file__], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *read, written = json.loads(done.stdout.splitlines()[-1])
    for found in read:
        ours = torch.tensor(found, dtype=torch.int32).view(torch.float32)
        assert torch.equal(ours.isnan(), KNOWN.isnan()) and torch.equal(ours.nan_to_num(), KNOWN.nan_to_num())
        assert torch.equal(ours.signbit()[~KNOWN.isnan()], KNOWN.signbit()[~KNOWN.isnan()])
    theirs = numbers().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert written == theirs.tolist()


@pytest.mark.parametrize("bits", sorted(set(LEVELS.values())))
@pytest.mark.parametrize("width", [1, 7, 8])
def test_packed_codes_come_back(bits: int, width: int) -> None:
    codes = torch.randint(0, 2**bits, (3, width), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, -(-width * bits // 8)) and torch.equal(unpack(packed, bits)[:, :width], codes)


if __name__ == "__main__":
    tell()
