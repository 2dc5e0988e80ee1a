"""Adapters as a command line asks for them."""

from collections.abc import Sequence

from mmsdk.apps.beforehand import adapters_in
from mmsdk.errors import InputError
from mmsdk.pipeline import Pipeline

__all__ = ["adapted"]


def adapted(pipe: Pipeline, texts: Sequence[str]) -> dict[str, float]:
    """Load adapters, written as `mmsdk.apps.beforehand.adapters_in` reads them; all of them together, as a pipeline is told.

    Raises InputError as that does, and for a name that the pipeline has already, and what `Pipeline.load_adapter` raises.
    """
    for name, path in adapters_in(texts).items():
        if name in pipe.adapters.names:
            raise InputError(f"two adapters are called {name!r}; write NAME=PATH", item=path)
        pipe.load_adapter(path, name)
    return dict.fromkeys(pipe.adapters.names, 1.0)
