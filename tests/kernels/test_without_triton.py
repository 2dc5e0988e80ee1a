"""Where there is no Triton, as with PyTorch's CPU build alone, everything imports and operations run their references."""

import subprocess
import sys

CODE = """
import sys
sys.modules["triton"] = None
import torch
import mmsdk.pipeline
from mmsdk.kernels.ops import find, names
from mmsdk.kernels.ops.swiglu import swiglu
x = torch.arange(8.0).reshape(1, 8)
assert torch.equal(swiglu(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
print(*[name for name in names() if find(name).cases])
"""


def test_references_run_and_every_kernel_imports_without_triton() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"gather", "rms_norm", "swiglu", "flash_prefill"} <= set(done.stdout.split())
