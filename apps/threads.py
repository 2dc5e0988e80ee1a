"""How many threads compute: `--threads N`, said to OpenMP before torch is imported."""

import os
import sys

from mmsdk.errors import InputError

__all__ = ["MOST", "limit"]

MOST = 1024


def limit(threads: int) -> None:
    """Let so many threads compute, in torch and in our own C++, which share OpenMP's; 0 leaves it to torch, which takes all cores.

    OpenMP and MKL read their variables once, when torch is imported, and each thread that computes, such as a server's, and each process
    that is begun inherits them. Raises InputError for a number that cannot be.
    """
    if not 0 <= threads <= MOST:
        raise InputError(f"it is {threads}, expected 1 to {MOST}, or 0 for one on each core", item="--threads")
    if not threads:
        return
    # torch asks MKL where it has it, which goes by a variable of its own before OpenMP's
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)))
    if torch := sys.modules.get("torch"):
        # whoever runs a command from Python has it already
        torch.set_num_threads(threads)
