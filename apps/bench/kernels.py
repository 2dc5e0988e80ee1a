"""Kernels: what each takes of a GPU when compiled for it, and how far it is from its reference."""

from dataclasses import asdict, dataclass

import torch

from mmsdk.apps.console import Cell
from mmsdk.errors import InputError, ModelError
from mmsdk.kernels.case import TOLERANCE
from mmsdk.kernels.ops import find, names
from mmsdk.kernels.proof import Agreement, compare, interpreted
from mmsdk.kernels.targets import TARGETS, Resources, resources

__all__ = ["Kernels"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Compiles `op` (or all) for every target, with no need of a GPU, and runs its small cases, on a GPU or in Triton's interpreter.

    `compile_only` leaves the second out. No rows come of a kernel that is further from its reference than the tolerance table allows.
    """

    op: str = "all"
    compile_only: bool = False

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {op, case, target, registers, spills, shared_bytes, max_abs_err}; compiled for bfloat16, the error of the float32 cases."""
        if self.op not in ("all", *names()):
            raise InputError(f"there are all, {', '.join(names())}; got {self.op!r}", item="op")
        chosen = names() if self.op == "all" else [self.op]
        # compiled first: it is quick, and tells where there is no Triton
        builds = [(name, case, target) for name in chosen for case in find(name).builds for target in TARGETS]
        taken = [resources(find(name), case, torch.bfloat16, target) for name, case, target in builds]
        errors: dict[str, float] = {} if self.compile_only else _errors(chosen)
        return [_row(name, case.name, target, one, errors.get(name)) for (name, case, target), one in zip(builds, taken, strict=True)]


def _row(op: str, case: str, target: str, taken: Resources, error: float | None) -> dict[str, Cell]:
    return {"op": op, "case": case, "target": target, **asdict(taken), "max_abs_err": error}


def _errors(chosen: list[str]) -> dict[str, float]:
    found = _measured(chosen) if torch.cuda.is_available() else interpreted(chosen)
    for row in found:
        if not row.within:
            raise ModelError(f"{row.op} is {row.error:.3g} from its reference on {row.case!r} at {row.dtype}")
    return {name: max(row.error for row in found if row.op == name and row.dtype == "float32") for name in chosen}


def _measured(chosen: list[str]) -> list[Agreement]:
    device = torch.device("cuda")
    return [compare(name, find(name), case, dtype, device) for name in chosen for case in find(name).cases for dtype in TOLERANCE]
