"""The folder for what mmsdk fetches, compiles or measures once and can have again."""

import os
import sys
from pathlib import Path

from mmsdk.errors import WeightsError

__all__ = ["SETTING", "cache_folder"]

SETTING = "MMSDK_CACHE"


def cache_folder() -> Path:
    """The user's cache folder for mmsdk, not created here.

    The setting MMSDK_CACHE names it outright; without it, it is the platform's own place: `$XDG_CACHE_HOME/mmsdk` or
    `~/.cache/mmsdk` on Linux, `~/Library/Caches/mmsdk` on macOS, `%LOCALAPPDATA%\\mmsdk\\Cache` on Windows.
    Raises WeightsError where the user has no home folder.
    """
    chosen = os.environ.get(SETTING)
    if chosen:
        return Path(chosen).expanduser().absolute()
    try:
        home = Path.home()
    except RuntimeError as error:
        raise WeightsError(f"no home folder for the cache: set {SETTING} to a folder that you can write") from error
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "mmsdk"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "mmsdk" / "Cache"
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG base directory specification asks to ignore a relative path.
    return (xdg if xdg.is_absolute() else home / ".cache") / "mmsdk"
