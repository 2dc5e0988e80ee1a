"""`mmsdk serve`: a model behind an API that OpenAI's clients speak, until Ctrl-C. It needs the extra `serve`."""

import argparse

from mmsdk.apps.loading import needing

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Serve. Raises InputError, naming the extra, where a package is missing."""
    code: int = needing("mmsdk.apps.serve.main", "serve", "serve").run(args)
    return code
