"""The public names of `import mmsdk`: all there, all lazy, none hidden by a submodule of the same name."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mmsdk

HEAVY = ["torch", "transformers", "numpy", "PIL", "cv2", "jaxtyping", "huggingface_hub"]


def python(code: str, folder: Path) -> str:
    """What a fresh interpreter prints, started in an empty folder."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", mmsdk.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(mmsdk, name) is not None
    assert name in dir(mmsdk)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'mmsdk' has no attribute 'pipelines'"):
        mmsdk.pipelines  # type: ignore[attr-defined]  # noqa: B018


def test_the_stub_tells_type_checkers_the_same_names() -> None:
    stub = ast.parse(Path(mmsdk.__file__).with_name("__init__.pyi").read_text(encoding="utf-8"))
    names = [alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    names += [node.target.id for node in stub.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    assert sorted(name or "" for name in names) == sorted(mmsdk.__all__)


def test_importing_mmsdk_imports_nothing_heavy(tmp_path: Path) -> None:
    assert python(f"import sys, mmsdk; print([name for name in {HEAVY} if name in sys.modules])", tmp_path) == "[]"


def test_importing_kernels_alone_brings_no_model_code(tmp_path: Path) -> None:
    seen = python("import sys, mmsdk.kernels; print([name for name in sys.modules if name.startswith('mmsdk')])", tmp_path)
    assert set(ast.literal_eval(seen)) == {"mmsdk", "mmsdk.errors", "mmsdk.kernels"}


@pytest.mark.parametrize("first", ["from mmsdk.pipeline import Pipeline", "import mmsdk; mmsdk.Pipeline"])
def test_pipeline_is_the_function_whatever_was_imported_first(first: str, tmp_path: Path) -> None:
    assert python(
        f"{first}; import mmsdk; from mmsdk import pipeline; print(mmsdk.pipeline is pipeline, type(pipeline).__name__)", tmp_path
    ) == ("True function")
