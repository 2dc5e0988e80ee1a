"""Where the command `mmsdk` begins: Ctrl-C is quiet from here on, before anything that takes time is imported."""

from importlib import import_module

from mmsdk.apps.interrupts import end, leaving_at_once

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process; the exit code, as `mmsdk.apps.cli` tells it."""
    leaving_at_once()
    code: int = import_module("mmsdk.apps.cli").main()
    return end(code)


if __name__ == "__main__":
    raise SystemExit(main())
