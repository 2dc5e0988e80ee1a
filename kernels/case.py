"""What a kernel file declares: an operation, its reference, how it is launched, and the cases that prove it.

    OP = Op(reference, plan, cases, builds)

`reference` is the truth, in torch, with float32 sums. `plan` takes the same arguments, allocates the results and says what to launch, and
reads no value of any tensor: it works on the meta device too, which is how a kernel is compiled without a GPU.
"""

import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmsdk.errors import InputError

__all__ = ["TOLERANCE", "Arguments", "Case", "Launch", "Op", "Plan", "Result", "distant", "normal"]

# How far a kernel may be from its reference, as a share of 1 + |reference|. An operation may be tighter, never looser.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

Arguments = tuple[object, ...]
Result = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, what it is given and over how many programs; `constants` are compiled in.

    Only the first axis of a grid may be long: on the others a GPU takes 65,535.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int | float]
    constants: Mapping[str, object]
    warps: int = 4
    stages: int = 2

    @property
    def options(self) -> dict[str, int | bool]:
        """What Triton is told; products and sums may fuse, which it wants said."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def __call__(self) -> None:
        """Start it; on a GPU this returns before it is done. Raises InputError for 2**31 programs or more, which Triton would drop."""
        programs = math.prod(self.grid)
        if programs >= 2**31:
            raise InputError(f"{programs} programs are too many for one launch; split the batch", item=self.kernel.__name__)
        self.kernel[self.grid](**self.arguments, **self.constants, **self.options)


@dataclass(frozen=True, slots=True)
class Plan:
    """Results that hold nothing yet, and the launches that fill them, in order."""

    out: Result
    launches: tuple[Launch, ...]

    def run(self) -> Result:
        """Launch all, on the device that holds the results, and return them."""
        with torch.cuda.device_of(self.out[0]):
            for launch in self.launches:
                launch()
        return self.out


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments by name: the same ones whenever the generator starts from the same seed."""

    name: str
    make: Callable[[torch.Generator, torch.dtype], Arguments]


@dataclass(frozen=True, slots=True)
class Op:
    """An operation. `cases` are small and odd, to be compared; `builds` have the sizes of real models, to be compiled."""

    reference: Callable[..., Result]
    plan: Callable[..., Plan]
    cases: tuple[Case, ...]
    builds: tuple[Case, ...]


def normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers from the standard normal distribution, drawn in float32 so that every dtype rounds the same ones."""
    return torch.randn(shape, generator=generator).to(dtype)


def distant(rows: Tensor) -> Tensor:
    """The same contents with more than 2**31 elements from one row to the next, so that 32-bit offsets cannot reach them.

    The address space between the rows is reserved, never touched, and takes no memory. Linux only, like the kernels.
    """
    stride = 2**31 + 64
    elements = (rows.shape[0] - 1) * stride + rows[0].numel()
    no_reserve = 0x4000  # MAP_NORESERVE, which Python names from 3.12 on
    memory = mmap.mmap(-1, elements * rows.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    inner = rows[0].contiguous().stride()
    return torch.frombuffer(memory, dtype=rows.dtype, count=elements).as_strided(rows.shape, (stride, *inner)).copy_(rows)
