"""Whether a kernel agrees with its reference: on a GPU where there is one, else in Triton's interpreter.

Memory that a plan allocates is filled with NaN first, so that what a kernel forgets to write is seen.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from mmsdk.kernels.case import TOLERANCE, Arguments, Case, Op
from mmsdk.kernels.ops import find

__all__ = ["Agreement", "compare", "interpreted", "moved", "poisoned", "tell"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the kernel of one case is from its reference: the largest difference, and whether all are within the table."""

    op: str
    case: str
    dtype: str
    error: float
    within: bool


def compare(name: str, op: Op, case: Case, dtype: torch.dtype, device: torch.device) -> Agreement:
    """Run both on fresh arguments. Without a GPU the process must have been started with TRITON_INTERPRET=1."""
    truth = op.reference(*_arguments(case, dtype, device))
    arguments = _arguments(case, dtype, device)
    with poisoned():
        ours = op.plan(*arguments).run()
    kind = str(dtype).removeprefix("torch.")
    same = len(ours) == len(truth) and all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(ours, truth, strict=True))
    if not same:
        return Agreement(name, case.name, kind, torch.inf, False)
    # whole numbers, codes and choices, are the same ones or wrong
    found = [_apart(a, b, TOLERANCE[dtype] if a.is_floating_point() else 0.0) for a, b in zip(ours, truth, strict=True)]
    return Agreement(name, case.name, kind, max(error for error, _ in found), all(within for _, within in found))


@contextmanager
def poisoned() -> Iterator[None]:
    """Within, torch.empty gives NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    # torch then fills new memory, unless torch.utils.deterministic was told not to
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def interpreted(names: Sequence[str]) -> list[Agreement]:
    """All cases of these operations at three dtypes, in a process of their own: the interpreter is chosen before triton is imported."""
    program = "import sys; from mmsdk.kernels.proof import tell; tell(sys.argv[1:])"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program, *names], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the interpreter stopped:\n{done.stderr}")
    return [Agreement(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def tell(names: Sequence[str]) -> None:
    """The other side of `interpreted`: one line of JSON on standard output."""
    ops = {name: find(name) for name in names}
    device = torch.device("cpu")
    found = [compare(name, op, case, dtype, device) for name, op in ops.items() for case in op.cases for dtype in TOLERANCE]
    sys.stdout.write(json.dumps([asdict(row) for row in found]) + "\n")


def moved(arguments: Arguments, device: torch.device) -> Arguments:
    """The same arguments with their tensors on another device."""
    return tuple(value.to(device) if isinstance(value, Tensor) else value for value in arguments)


def _arguments(case: Case, dtype: torch.dtype, device: torch.device) -> Arguments:
    return moved(case.make(torch.Generator().manual_seed(0), dtype), device)


def _apart(ours: Tensor, truth: Tensor, tolerance: float) -> tuple[float, bool]:
    """The largest difference, and whether each is at most that share of 1 + |truth|. Equal infinities are no distance apart."""
    if not ours.numel():
        return 0.0, True
    a, b = ours.double(), truth.double()
    apart = torch.where(a == b, 0.0, (a - b).abs())
    within = apart <= tolerance * (1 + b.abs().nan_to_num(posinf=0.0))
    return apart.max().item(), bool(within.all())
