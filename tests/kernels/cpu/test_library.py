"""The library is there wherever it can be: its tests are skipped where it is not, and nobody would see that it does not compile."""

import shutil
import sys

import pytest
import torch

from mmsdk.kernels.cpu.library import library

possible = sys.platform == "linux" and shutil.which("g++") is not None and torch.cpu.get_capabilities().get("avx512_bf16", False)


@pytest.mark.skipif(not possible, reason="no Linux, no g++ or no AVX-512 BF16 here")
def test_it_compiles_on_a_machine_that_can_have_it() -> None:
    assert library().functions is not None, library().state
