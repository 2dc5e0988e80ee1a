"""Rules that the linters cannot hold: what every source file of the SDK looks like, read as text and never imported."""

import ast
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
FILES = sorted(path for folder in FOLDERS.values() for path in (ROOT / folder).rglob("*.py"))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(tree: ast.Module) -> list[str]:
    """Every module that a file imports, relative imports with their leading dots."""
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return names + ["." * node.level + (node.module or "") for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


@pytest.mark.parametrize("path", FILES, ids=named)
def test_imports_of_our_own_are_absolute_and_begin_with_mmsdk(path: Path) -> None:
    siblings = {folder for folder in FOLDERS.values() if folder != "mmsdk"}
    names = imported(ast.parse(path.read_text(encoding="utf-8")))
    assert not [name for name in names if name.startswith(".") or name.partition(".")[0] in siblings]


@pytest.mark.parametrize("path", FILES, ids=named)
def test_no_cycle_hides_behind_type_checking(path: Path) -> None:
    names = {node.id for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Name)}
    assert "TYPE_CHECKING" not in names


def test_no_file_is_a_drawer_for_odds_and_ends() -> None:
    assert not [named(path) for path in FILES if path.stem in {"utils", "helpers", "common", "misc", "util"}]


def test_every_folder_with_code_is_a_package_that_gets_installed() -> None:
    prefixes = {folder: name for name, folder in FOLDERS.items()}
    found = {".".join([prefixes[parts[0]], *parts[1:-1]]) for parts in (path.relative_to(ROOT).parts for path in FILES)}
    assert sorted(found) == sorted(PROJECT["tool"]["setuptools"]["packages"])
    assert not [named(path.parent) for path in FILES if not (path.parent / "__init__.py").is_file()]


def test_pinned_versions_lie_within_the_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    extras = PROJECT["project"]["optional-dependencies"]
    texts = [*PROJECT["project"]["dependencies"], *(text for name in sorted(extras) for text in extras[name])]
    wanted = [item for item in map(Requirement, texts) if item.name != "mmsdk"]
    assert not [str(item) for item in wanted if "<" not in str(item.specifier)]
    assert not [str(item) for item in wanted if pins[canonicalize_name(item.name)] not in item.specifier]
