"""Adapters as a command line asks for them."""

import os
from collections.abc import Sequence
from pathlib import Path

from mmsdk.errors import InputError
from mmsdk.pipeline import Pipeline

__all__ = ["adapted"]


def adapted(pipe: Pipeline, texts: Sequence[str]) -> dict[str, float]:
    """Load adapters, each written as PATH or NAME=PATH; all of them together, as a pipeline is told. A path's last part is its name.

    Raises InputError for two of one name, and what `Pipeline.load_adapter` raises.
    """
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or "/" in name or os.sep in name:
            name, path = Path(text).name, text
        if name in pipe.adapters.names:
            raise InputError(f"two adapters are called {name!r}; write NAME=PATH", item=text)
        pipe.load_adapter(path, name)
    return dict.fromkeys(pipe.adapters.names, 1.0)
