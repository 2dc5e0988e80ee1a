"""A model's folder from what the user calls it: a folder on this machine, or "org/name" on the Hugging Face hub.

Only weights in safetensors, settings and tokenizers are fetched. Code that a repository holds is neither fetched nor run.
"""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, XetDownloadError
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # httpx or httpx2, whichever this version of the hub's client uses

from mmsdk.errors import WeightsError

__all__ = ["SETTINGS", "WEIGHTS", "resolve"]

SETTINGS = "config.json"
WEIGHTS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
_UNWANTED = ["*/*"]
# How a download fails: over HTTP; by an address or a proxy that cannot be used (InvalidURL, ValueError, ImportError where a proxy needs
# another package); on the disk; and inside hf_xet, which raises RuntimeError for what is neither network nor disk.
_FAILURES = (httpx.HTTPError, httpx.InvalidURL, ValueError, ImportError, OSError, RuntimeError, XetDownloadError)


def resolve(name: str, wanted: Sequence[str] = WEIGHTS, nested: bool = False) -> Path:
    """The folder of a model; of one on the hub, the files that match `wanted` are in it, fetched where they are not on this machine.

    Files in folders of their own are left out unless they are `nested`. What was fetched before is used again, also without a network.
    Raises WeightsError where it cannot be had.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=list(wanted), ignore_patterns=None if nested else _UNWANTED))
    except HFValidationError as error:
        raise WeightsError(f'{name!r} is neither a folder nor a name like "org/name"') from error
    except LocalEntryNotFoundError as error:
        raise WeightsError(f"{name} is no folder here and cannot be fetched from the hub: {_unreached(name, error)}") from error
    except _FAILURES as error:
        raise WeightsError(f"{name} is no folder here and cannot be fetched from the hub: {_told(error)}") from error


def _unreached(name: str, error: LocalEntryNotFoundError) -> str:
    """Why nothing comes from the hub, and what to do about it: the client itself tells that something is not in its cache."""
    why = error.__cause__
    if isinstance(why, OfflineModeIsEnabled):
        reason, fix = "HF_HUB_OFFLINE is set, so that it is not asked", "set HF_HUB_OFFLINE=0"
    else:
        reason, fix = "it cannot be reached" + (f" ({_told(why)})" if why else ""), "see that this machine has a network"
    return (
        f"{reason}, and not all that is needed was fetched before into {constants.HF_HUB_CACHE}; {fix}, copy that folder from a machine "
        f"that has it (HF_HUB_CACHE names another one), or give the folder that `hf download {name} --local-dir FOLDER` makes elsewhere"
    )


def _told(error: BaseException) -> str:
    # the hub's errors go on for paragraphs
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
