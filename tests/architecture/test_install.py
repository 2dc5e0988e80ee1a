"""Four ways to have mmsdk, and every module of it imports in each: editable, wheel, wheel with the clone as working folder, bare tree.

The environments are new and empty but for a .pth line that lends them this environment's third-party packages, mmsdk not among them. The
wheel stands beside Hugging Face's `kernels`, a top-level package of the same name as one of our folders.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
IMPORT_ALL = """
import importlib, json, sys
print(json.dumps({name: importlib.import_module(name).__file__ for name in json.loads(sys.argv[1])}))
"""


def modules() -> list[str]:
    """Every module by its import name, `__main__` files aside: importing those would run a program."""
    found = []
    for name, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if parts[-1] != "__main__":
                found.append(".".join([name, *parts]).removesuffix(".__init__"))
    return sorted(found)


def pip(*arguments: str) -> None:
    """Run pip; its own words are the message where it fails."""
    done = subprocess.run([*PIP, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def environment(folder: Path) -> Path:
    """A new environment that sees this one's third-party packages; gives its interpreter."""
    venv.create(folder, symlinks=os.name != "nt")
    # Files named *.pth in a folder that a .pth line adds are not read, so an editable mmsdk of this environment stays out of sight.
    lent = "\n".join([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (site_packages(folder) / "third_party.pth").write_text(lent, encoding="utf-8")
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def site_packages(folder: Path) -> Path:
    """Where the environment in `folder` keeps its packages."""
    return Path(sysconfig.get_path("purelib", scheme="venv", vars={"base": str(folder), "platbase": str(folder)}))


def imports(python: Path, folder: Path) -> dict[str, str]:
    """Import every module with `folder` as working folder; where each came from."""
    done = subprocess.run(
        [python, "-c", IMPORT_ALL, json.dumps(modules())], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stderr
    files: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return files


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree to build from, so that nothing is left behind here and nothing stale from here gets in."""
    copy = tmp_path_factory.mktemp("tree") / "clone"
    copy.mkdir()
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ["pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(clone))
    return next(folder.glob("mmsdk-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose site-packages hold Hugging Face's `kernels` and then our wheel."""
    python = environment(tmp_path_factory.mktemp("installed") / "venv")
    site = site_packages(python.parents[1])
    source = importlib.metadata.distribution("kernels")
    for entry in source.files or []:
        if ".." not in entry.parts and entry.suffix != ".pyc":
            (site / entry).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source.locate_file(entry), site / entry)
    pip("--python", str(python), "install", "--quiet", "--no-deps", str(wheel))
    return python


def test_the_wheel_holds_one_top_level_name(wheel: Path) -> None:
    names = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"mmsdk"}


def test_the_wheel_holds_every_file_that_is_not_code(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    for name, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix not in {".py", ".pyc"} and "__pycache__" not in path.parts:
                assert f"{name.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}" in held


def test_the_wheel_leaves_other_peoples_kernels_alone(installed: Path) -> None:
    site = site_packages(installed.parents[1])
    source = importlib.metadata.distribution("kernels")
    for entry in source.files or []:
        if entry.suffix == ".py":
            assert (site / entry).read_bytes() == Path(str(source.locate_file(entry))).read_bytes()
    assert not [name for name in ("vision", "tokencomp", "vla", "apps", "tests") if (site / name).exists()]


def test_a_wheel_imports_every_module(installed: Path, tmp_path: Path) -> None:
    files = imports(installed, tmp_path)
    assert not [file for file in files.values() if not Path(file).is_relative_to(installed.parents[1])]


def test_a_wheel_imports_every_module_from_within_the_clone(installed: Path, clone: Path) -> None:
    assert imports(installed, clone).keys() == set(modules())


def test_a_bare_tree_imports_every_module(clone: Path, tmp_path: Path) -> None:
    files = imports(environment(tmp_path / "venv"), clone)
    assert not [file for file in files.values() if not Path(file).is_relative_to(clone)]


def test_an_editable_install_imports_every_module(clone: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv")
    pip("--python", str(python), "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", str(clone))
    files = imports(python, tmp_path)
    assert not [file for file in files.values() if not Path(file).is_relative_to(clone)]


def test_the_wheel_installs_its_command(installed: Path) -> None:
    done = subprocess.run([installed.parent / "mmsdk", "--help"], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr
    assert "ask" in done.stdout
