"""What a checkpoint was made with and what it answered there, so that loading it elsewhere proves that it still does.

Under another version of a library, or another fork of one, a checkpoint loads without complaint and acts differently. So beside it lie the
versions that it was made with, which are compared and told, and one question with its answer (a parity vector), which is asked again: an
answer that differs is an error, whatever the versions say. `origin.json` and `origin.safetensors`: nothing in either can run.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import safetensors
import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from mmsdk.errors import ModelError, WeightsError
from mmsdk.vision.types import Image
from mmsdk.vla.types import Observation, Policy, Request, Stamp
from mmsdk.weights.fields import read_fields

__all__ = ["Origin", "differing", "installed", "prove", "read_origin", "write_origin"]

_FIELDS, _TENSORS, _PICTURE = "origin.json", "origin.safetensors", "image."


@dataclass(frozen=True, slots=True)
class Origin:
    """Versions by the name of a distribution (see `installed`), and what a model answered to one request, in its own units.

    `tolerance` is how far any number of the answer may be from the recorded one: another processor rounds differently.
    """

    versions: Mapping[str, str]
    request: Request
    actions: Float[Tensor, "h a"]
    tolerance: float = 1e-3


def installed(name: str) -> str:
    """The version of an installed distribution, with its address and commit where it was installed from a repository; "" for none."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return ""
    source = json.loads(found.read_text("direct_url.json") or "{}")
    commit = source.get("vcs_info", {}).get("commit_id", "")
    return f"{found.version} from {source['url']} at {commit}" if commit else found.version


def differing(versions: Mapping[str, str]) -> list[str]:
    """Where these versions are not the installed ones, one line each."""
    here = {name: installed(name) for name in versions}
    return [f"{name}: made with {made}, here is {here[name] or 'none'}" for name, made in versions.items() if here[name] != made]


def prove(model: Policy, origin: Origin) -> None:
    """Ask the recorded question again. Warns (UserWarning) of versions that differ; raises ModelError where the answer does.

    `model` answers in the units of the record: before a robot is put around it.
    """
    told = differing(origin.versions)
    if told:
        warnings.warn(f"the checkpoint was made with other versions; {'; '.join(told)}", stacklevel=2)
    model.reset(0)
    actions, wanted = model(origin.request).actions.detach().cpu().double(), origin.actions.double()
    model.reset(0)
    if actions.shape != wanted.shape:
        raise ModelError(f"the model answers its parity vector with {tuple(actions.shape)} numbers, recorded are {tuple(wanted.shape)}")
    apart = float((actions - wanted).abs().max())
    # NaN fails this comparison, as it should
    if not apart <= origin.tolerance:
        because = f" ({'; '.join(told)})" if told else ""
        raise ModelError(f"the model's answer to its parity vector differs by {apart:.3g}, allowed {origin.tolerance:g}{because}")


def write_origin(origin: Origin, folder: Path) -> None:
    """Write the record beside a checkpoint."""
    observation = origin.request.observation
    pictures = {_PICTURE + name: image.pixels.contiguous() for name, image in observation.images.items()}
    request = origin.request
    tensors = {"state": observation.state, "pending": request.pending, "noise": request.noise, "actions": origin.actions}
    save_file({**{name: tensor.detach().contiguous() for name, tensor in tensors.items()}, **pictures}, folder / _TENSORS)
    fields = {
        "versions": dict(origin.versions),
        "instruction": observation.instruction,
        "seed": observation.stamp.seed,
        "delay": request.delay,
        "tolerance": origin.tolerance,
    }
    (folder / _FIELDS).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def read_origin(folder: Path) -> Origin:
    """The record beside a checkpoint. Raises WeightsError for files that are missing or damaged, ModelError for fields that are."""
    fields, tensors = read_fields(folder / _FIELDS), _tensors(folder / _TENSORS)
    lacking = [name for name in ("state", "pending", "noise", "actions") if name not in tensors]
    if lacking:
        raise ModelError(f"{folder / _TENSORS} lacks {', '.join(lacking)}")
    images = {name.removeprefix(_PICTURE): Image(tensors[name], name) for name in tensors if name.startswith(_PICTURE)}
    stamp = Stamp(0.0, request=1, seed=fields.whole("seed"))
    observation = Observation(images, tensors["state"], fields.text("instruction"), stamp)
    versions = fields.group("versions")
    return Origin(
        {name: versions.text(name) for name in versions.values},
        Request(observation, tensors["pending"], fields.whole("delay"), noise=tensors["noise"]),
        tensors["actions"],
        fields.real("tolerance"),
    )


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            found: dict[str, Tensor] = {name: torch.as_tensor(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{path} is missing or damaged: {error}") from None
    return found
