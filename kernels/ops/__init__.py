"""The operations, one file each: a file that is here is compared, compiled and measured, with no other edit.

No GPU has run these kernels yet. They agree with their references under Triton's interpreter and compile for the targets of
`mmsdk.kernels.targets`; what they do on a device, and how fast, is not known.
"""

from importlib import import_module
from pkgutil import iter_modules

from mmsdk.kernels.case import Op

__all__ = ["find", "names"]


def names() -> list[str]:
    """Every operation, sorted."""
    return sorted(entry.name for entry in iter_modules(__path__))


def find(name: str) -> Op:
    """What the file of that name declares."""
    op: Op = import_module(f"{__name__}.{name}").OP
    return op
