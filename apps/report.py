"""Where a number was measured: the machine, the versions and the code, as every bench prints them."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from mmsdk import __version__

__all__ = ["ROOT", "commit", "hardware", "versions"]

# The folder that holds apps/, benchmarks/ and the rest where mmsdk runs from a source tree.
ROOT = Path(__file__).resolve().parent.parent

LIBRARIES = ("numpy", "tokenizers", "torch", "transformers")


def hardware() -> dict[str, str | int | float]:
    """The processor as the system names it, its cores and memory, bfloat16 units, and the GPU where there is one."""
    import torch  # a kept result is printed without it

    facts: dict[str, str | int | float] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_gb": round(_memory_bytes() / 2**30, 1),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def versions() -> dict[str, str]:
    """Versions of Python, of mmsdk (and its commit, in a clone) and of what it computes with."""
    found = {name: metadata.version(name) for name in LIBRARIES}
    return {"python": platform.python_version(), "mmsdk": __version__, "commit": commit(ROOT), **found}


def commit(root: Path) -> str:
    """The commit of a clone, and "-dirty" behind it where any file differs from it or is new; "" where there is no clone or no git.

    Results under benchmarks/results do not count: one of them is being written while the bench asks.
    """
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = _git(root, "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return f"{head}-dirty" if head and changed else head


def _cpu_name() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 0


def _git(root: Path, *words: str) -> str:
    asked = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    return asked.stdout.strip()
