"""What can be seen to be wrong with the name of a model or an adapter at a glance: nothing is read, and nothing heavy imported."""

import os

from mmsdk.errors import ModelError

__all__ = ["HOW_TO_FILM", "check_maker", "nowhere"]

HOW_TO_FILM = "train one with `python -m mmsdk.apps.train_video` and name its folder, build/train_video/model"


def nowhere(name: str) -> bool:
    """Whether it is no folder here, and is not written as one on the hub, "org/name": neither part is empty, or has a path's first sign."""
    if os.path.isdir(os.path.expanduser(name)):
        return False
    org, _, own = name.partition("/")
    return not org or not own or "/" in own or org.startswith((".", "~")) or own in (".", "..")


def check_maker(name: str) -> None:
    """Raises ModelError where the name of a model that makes clips is that of no folder here, and cannot be one on the hub."""
    if nowhere(name):
        what = f"folder {name!r}" if "/" in name else f"video model {name!r}; none comes with mmsdk yet"
        raise ModelError(f"there is no {what}: {HOW_TO_FILM}, or a folder of diffusers")
