"""Every kernel compiled for GPUs that need not be there, and what it takes of them: registers, spills, shared memory.

Triton brings its own ptxas and LLVM, so this works on any Linux machine; compiled kernels stay in Triton's cache. Arguments are specialised
as at a launch: numbers that are 1 are compiled in, pointers and multiples of 16 are known to be such.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import triton
from mmsdk.kernels.case import Case, Launch, Op
from mmsdk.kernels.proof import moved

__all__ = ["TARGETS", "Resources", "compiled", "resources"]

# backend, architecture, threads of a warp: A100, H100 and H200, MI300
TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}

# What a block may take of shared memory, in bytes.
SHARED = {"sm_80": 166_912, "sm_90": 232_448, "gfx942": 65_536}

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, slots=True)
class Resources:
    """Registers and spilled bytes of one thread, shared memory of one block; the largest of an operation's kernels."""

    registers: int
    spills: int
    shared_bytes: int


def resources(op: Op, case: Case, dtype: torch.dtype, target: str) -> Resources:
    """Compile what the operation would launch for this case. Raises InputError for an unknown target, and where there is no Triton."""
    if target not in TARGETS:
        raise InputError(f"there are {', '.join(TARGETS)}; got {target!r}", item="target")
    if triton is None or triton.knobs.runtime.interpret:
        raise InputError(
            'compiling needs Triton (on Linux: pip install ".[kernels]" in the clone), and TRITON_INTERPRET not set', item=target
        )
    arguments = moved(case.make(torch.Generator().manual_seed(0), dtype), torch.device("meta"))
    # a launch for each of many steps is compiled once
    different = {_specialised(launch): launch for launch in op.plan(*arguments).launches}
    found = [_taken(compiled(launch, target), target) for launch in different.values()]
    return Resources(*(max(column) for column in zip(*found, strict=True)))


def _specialised(launch: Launch) -> object:
    """What of a launch its compiled kernel hangs on."""
    given = launch.arguments.items()
    told = [(name, value.dtype if isinstance(value, Tensor) else (_kind(value), value == 1, value % 16 == 0)) for name, value in given]
    return launch.kernel.fn, tuple(told), str(dict(launch.constants)), str(launch.options)


def compiled(launch: Launch, target: str) -> Any:
    """Triton's compiled kernel: `asm` holds its stages by name, `metadata` what it needs."""
    signature: dict[str, str] = {}
    constants: dict[str, object] = dict(launch.constants)
    attributes: dict[tuple[int], list[list[str | int]]] = {}
    for place, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments.get(name)
        if name in launch.constants or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants.setdefault(name, value)
            continue
        signature[name] = _kind(launch.arguments[name])
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=triton.backends.compiler.GPUTarget(*TARGETS[target]), options=launch.options)


def _kind(value: Tensor | int | float) -> str:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _taken(kernel: Any, target: str) -> tuple[int, int, int]:
    registers, spills = _amd(kernel.asm["amdgcn"]) if target.startswith("gfx") else _nvidia(kernel.asm["cubin"])
    return registers, spills, kernel.metadata.shared


def _nvidia(binary: bytes) -> tuple[int, int]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # registers that do not fit live on the thread's stack
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text) + _number(r"LOCAL:(\d+)", text)


def _amd(text: str) -> tuple[int, int]:
    spilled = _number(r"\.vgpr_spill_count:\s+(\d+)", text) + _number(r"\.sgpr_spill_count:\s+(\d+)", text)
    return _number(r"\.vgpr_count:\s+(\d+)", text), max(4 * spilled, _number(r"\.private_segment_fixed_size:\s+(\d+)", text))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"{pattern} is not in {text[:500]}"
    return int(found[1])
