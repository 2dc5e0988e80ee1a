"""What training needs of the machine that pip does not bring: OpenGL without a screen for the simulators, a C++ compiler for torch.compile.

Both are asked for when the program starts, not after the hours of work that come before their use.
"""

import ctypes.util
import importlib.util
import os
import shutil
import subprocess
import sys

from mmsdk.errors import InputError

__all__ = ["check_compiling", "check_rendering", "compiler", "osmesa", "screenless"]

_PACKAGES = ("metaworld", "gymnasium_robotics")
# what fails without OpenGL, in a process of its own: MuJoCo decides once, at its import, what it draws with
_DRAW = "import mujoco; mujoco.GLContext(8, 8).make_current()"


def osmesa() -> str | None:
    """The library that draws without screen and GPU, as the linker names it; None where it finds none."""
    return ctypes.util.find_library("OSMesa")


def compiler() -> str | None:
    """Where the C++ compiler lies that torch.compile calls on a CPU: the one that CXX names, else the usual one; None without it."""
    return shutil.which(_compiler())


def screenless() -> dict[str, str]:
    """The environment in which MuJoCo draws without a screen: by OSMesa, unless MUJOCO_GL names something else."""
    return {**os.environ, "MUJOCO_GL": os.environ.get("MUJOCO_GL", "osmesa")}


def check_compiling() -> None:
    """Raises InputError, naming the fix, where torch.compile would find no C++ compiler."""
    if compiler() is None:
        raise InputError("there is no such C++ compiler here, for torch.compile: apt install g++, or --no-compile", item=_compiler())


def check_rendering() -> None:
    """Draw nothing much off screen. Raises InputError, naming the fix, where that fails or a simulator is not installed."""
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise InputError(f'{package} is not installed: pip install ".[robots]" in the clone', item="rendering")
    environment = screenless()
    drawn = subprocess.run([sys.executable, "-c", _DRAW], env=environment, capture_output=True, text=True, check=False)
    if drawn.returncode:
        fix = "apt install libosmesa6" if environment["MUJOCO_GL"] == "osmesa" else "unset MUJOCO_GL and apt install libosmesa6"
        said = (drawn.stderr.strip().splitlines() or [f"exit code {drawn.returncode}"])[-1]
        raise InputError(f"MuJoCo cannot draw without a screen here: {fix} (it said: {said})", item="rendering")


def _compiler() -> str:
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
