"""mmsdk runs vision-language and vision-language-action models: pictures and clips in, text and robot actions out.

The public names are imported on first use (PEP 562), so that `import mmsdk` stays a matter of milliseconds.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from mmsdk.errors import BudgetError, InputError, MmsdkError, ModelError, PluginError, SafetyError, WeightsError, WireError

__version__ = "0.1.0"

_HOMES = {
    "Access": "mmsdk.vision.intake",
    "Answer": "mmsdk.answer",
    "Chat": "mmsdk.chat",
    "Clip": "mmsdk.diffusion.clip",
    "Encoded": "mmsdk.encoded",
    "Frames": "mmsdk.vision.intake",
    "GenerationConfig": "mmsdk.generate.config",
    "Image": "mmsdk.vision.types",
    "LegibilityWarning": "mmsdk.legibility",
    "Limits": "mmsdk.vision.intake",
    "Pipeline": "mmsdk.pipeline",
    "Sampling": "mmsdk.vision.intake",
    "Video": "mmsdk.vision.types",
    "VideoGeneration": "mmsdk.diffusion.filming",
    "VisualTokens": "mmsdk.vision.types",
    "World": "mmsdk.diffusion.world.door",
    "load": "mmsdk.vision.intake",
    "load_image": "mmsdk.vision.intake",
    "load_video": "mmsdk.vision.intake",
    "pipeline": "mmsdk.pipeline",
}

__all__ = [
    "Access",
    "Answer",
    "BudgetError",
    "Chat",
    "Clip",
    "Encoded",
    "Frames",
    "GenerationConfig",
    "Image",
    "InputError",
    "LegibilityWarning",
    "Limits",
    "MmsdkError",
    "ModelError",
    "Pipeline",
    "PluginError",
    "SafetyError",
    "Sampling",
    "Video",
    "VideoGeneration",
    "VisualTokens",
    "WeightsError",
    "WireError",
    "World",
    "__version__",
    "load",
    "load_image",
    "load_video",
    "pipeline",
]


class _Package(ModuleType):
    """The package as a module whose `pipeline` is always the function.

    Python binds a submodule's name on its package at the end of the submodule's import; without this, a
    `from mmsdk.pipeline import Pipeline` anywhere would turn `mmsdk.pipeline(...)` into a call of a module.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and value.__name__ == _HOMES.get(name):
            value = getattr(value, name)
        super().__setattr__(name, value)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'mmsdk' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _source_tree() -> list[str]:
    """The folder that holds mmsdk/, vision/, ... side by side, or nothing where mmsdk is installed as a wheel."""
    root = Path(__file__).resolve().parent.parent
    project = root / "pyproject.toml"
    return [str(root)] if project.is_file() and 'name = "mmsdk"' in project.read_text(encoding="utf-8") else []


# In a clone, Python finds ./mmsdk before any installed wheel; its sisters vision/, tokencomp/, ... stand one folder up.
__path__ = [*__path__, *_source_tree()]
sys.modules[__name__].__class__ = _Package
