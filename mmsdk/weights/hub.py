"""A model's folder from what the user calls it: a folder on this machine, or "org/name" on the Hugging Face hub.

Only weights in safetensors, settings and tokenizers are fetched. Code that a repository holds is neither fetched nor run.
"""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from mmsdk.errors import WeightsError

__all__ = ["resolve"]

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_UNWANTED = ["*/*"]


def resolve(name: str) -> Path:
    """The folder of a model, fetched from the hub where it is not on this machine.

    What was fetched before is used again, also without a network. Raises WeightsError where it cannot be had.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except HFValidationError as error:
        raise WeightsError(f'{name!r} is neither a folder nor a name like "org/name"') from error
    except (HfHubHTTPError, OSError) as error:
        raise WeightsError(f"{name} is no folder here and cannot be fetched from the hub: {error}") from error
