"""The C++ beside this file as a library: compiled once on the machine that runs it, in a few seconds, and kept in the cache folder.

    native = library()
    if native.functions is None: print(native.state)     # why there is none; torch's kernels do the work then

It wants Linux, a compiler and a processor with AVX-512 BF16 and VNNI (Intel since Cooper Lake and Sapphire Rapids, AMD since Zen 4). It
shares torch's threads: GCC links it to the one OpenMP that torch brings, and another compiler would not.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from mmsdk.cache import cache_folder
from mmsdk.errors import WeightsError

__all__ = ["Native", "compiled", "library"]

_FOLDER = Path(__file__).parent
_UNITS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "avx512vnni", "fma")
# Sums may be reordered where the code leaves it open. Not -ffast-math: a library linked with it makes the whole process lose its
# denormal numbers.
_LOOSE = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-freciprocal-math")
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", *_LOOSE, *(f"-m{unit}" for unit in _UNITS))
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long
_SIGNATURES = {
    "product": (_POINTER, _POINTER, _POINTER, _LONG),
    "written_out": (_POINTER, _POINTER),
    "norm_rows": (_POINTER, _POINTER, ctypes.c_float, _POINTER, _LONG, _LONG),
    "gate_rows": (_POINTER, _POINTER, _LONG, _LONG, _LONG),
    "turn_rows": (_POINTER, _POINTER, _POINTER, _POINTER, *(_LONG,) * 5),
    "project": (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _LONG),
    "attend": (_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _LONG, _POINTER, _LONG),
    "finish": (_POINTER, _POINTER, _POINTER, _POINTER, _LONG),
    "run": (_POINTER, _LONG, *(_POINTER,) * 5, _LONG, _LONG, *(_POINTER, _POINTER, _LONG) * 2, _POINTER, _POINTER, _LONG),
    "product_many": (_POINTER, _POINTER, _POINTER, _LONG),
    "project_many": (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _LONG),
    "finish_many": (_POINTER, _POINTER, _POINTER, _POINTER, _LONG),
    "attend_many": (_POINTER, _POINTER),
    "read_many": (_POINTER, _LONG, _POINTER, _LONG, _POINTER),
    "attend_blocks": (_POINTER, _POINTER),
    "block_project": (_POINTER, _POINTER, _POINTER, _LONG),
    "block_add": (_POINTER, _POINTER, _POINTER, _POINTER, _LONG),
    "block_feed": (_POINTER, _POINTER, _POINTER, _LONG),
    "choose_farthest": (_POINTER, _POINTER, *(_LONG,) * 5, ctypes.c_float, _POINTER),
    "choose_greedily": (_POINTER, _POINTER, *(_LONG,) * 5, ctypes.c_float, _POINTER),
    "drop_twins": (_POINTER, *(_LONG,) * 4, ctypes.c_float, _POINTER),
}
# Those that say whether there was memory.
_TELLING = ("choose_farthest", "choose_greedily", "drop_twins")


@dataclass(frozen=True, slots=True)
class Native:
    """The library's functions, none where this machine cannot have it; `state` says in a line what there is, or what is missing."""

    functions: ctypes.CDLL | None
    state: str


@cache
def library() -> Native:
    """The library of this process; compiles it the first time on a machine, or after a change."""
    has = torch.cpu.get_capabilities()
    if sys.platform != "linux" or not all(has.get(unit, False) for unit in ("avx512_bf16", "avx512_vnni")):
        return Native(None, "this processor has no AVX-512 BF16 and VNNI, for which it is written; torch's kernels decode")
    compiler = shutil.which("g++")
    if compiler is None:
        return Native(None, "no C++ compiler (g++) is on the PATH; torch's kernels decode, slower")
    try:
        path = compiled(compiler, cache_folder() / "native")
        functions = ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        return Native(None, f"{compiler} could not compile it ({_last_line(error.stderr)}); torch's kernels decode, slower")
    except (OSError, WeightsError) as error:
        return Native(None, f"it cannot be kept or opened ({error}); torch's kernels decode, slower")
    for name, arguments in _SIGNATURES.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = arguments, _LONG if name in _TELLING else None
    return Native(functions, f"compiled by {compiler}, in {path.parent}")


def compiled(compiler: str, folder: Path) -> Path:
    """The library in this folder, made there if need be: whole or not at all, also where several processes begin at once.

    Raises CalledProcessError where the compiler refuses, OSError where the folder cannot be written, or where others can write it and
    could have put anything there.
    """
    headers, sources = (sorted(_FOLDER.glob(kind)) for kind in ("*.h", "*.cpp"))
    text = b"\0".join(path.read_bytes() for path in (*headers, *sources))
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, stdin=subprocess.DEVNULL).stdout
    key = hashlib.sha256(b"\0".join((text, version, " ".join(_FLAGS).encode()))).hexdigest()[:32]
    path = folder / f"cpu-{key}.so"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for one in (folder, path):
        if one.exists() and (one.stat().st_uid not in (0, os.getuid()) or one.stat().st_mode & 0o022):
            raise PermissionError(f"{one} can be written by others")
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        made = Path(aside) / path.name
        command = [compiler, *_FLAGS, "-o", str(made), *map(str, sources)]
        subprocess.run(command, capture_output=True, check=True, text=True, stdin=subprocess.DEVNULL)
        os.replace(made, path)
    return path


def _last_line(text: str | bytes | None) -> str:
    lines = text.strip().splitlines() if isinstance(text, str) else []
    return lines[-1] if lines else "it said nothing"
