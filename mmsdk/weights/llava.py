"""What checkpoints of LLaVA and its successors have in common: how tensors are named over the years, and which states are read.

The names that the parts are read by are those of transformers 5: `model.vision_tower.`, `model.multi_modal_projector.`,
`model.language_model.`, `lm_head.`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.vision.encoders.states import States
from mmsdk.vision.projector import Projected, TwoLayers, activation
from mmsdk.vision.vit import ViT
from mmsdk.vision.weights import vit_from_transformers
from mmsdk.weights.fields import Fields
from mmsdk.weights.folder import Folder
from mmsdk.weights.modules import filled
from mmsdk.weights.safetensors import Checkpoint

__all__ = ["NEWLINE", "language_of", "newline_of", "projector_of", "renamed", "states_of", "tower_of"]

NEWLINE = "model.image_newline"
_TOWER, _PROJECTOR, _LANGUAGE, _HEAD = "model.vision_tower.", "model.multi_modal_projector.", "model.language_model.", "lm_head."

_RULES = (
    (r"^language_model\.lm_head\.", _HEAD),
    (r"^language_model\.(model\.)?", _LANGUAGE),
    (r"^(vision_tower|multi_modal_projector|image_newline)", r"model.\1"),
    (r"^model\.vision_tower\.vision_model\.", _TOWER),
)


def renamed(folder: Folder, *further: str) -> Checkpoint:
    """The tensors by their present names. Raises ModelError for any that is not of a known part, or of the `further` ones."""
    checkpoint = folder.checkpoint.renamed(_RULES)
    checkpoint.only(_TOWER, _PROJECTOR, _LANGUAGE, _HEAD, *further)
    return checkpoint


def language_of(checkpoint: Checkpoint) -> Checkpoint:
    """The tensors of the language model, named as those of a text model alone."""
    return checkpoint.under(_LANGUAGE, "model.").beside(checkpoint.under(_HEAD, _HEAD))


def tower_of(folder: Folder, checkpoint: Checkpoint, family: str, dtype: torch.dtype, device: torch.device) -> ViT:
    """The vision tower, which is of `family` where the settings do not say."""
    vision, tensors = folder.config.group("vision_config"), checkpoint.under(_TOWER)
    settings = {"model_type": family, **{name: value for name, value in vision.values.items() if value is not None}}
    found = {name: tensors.tensor(name) for name in tensors.files}
    return vit_from_transformers(settings, found, name=vision.where).to(device, dtype)


def states_of(fields: Fields, vit: ViT, layer: int, select: str) -> States:
    """The tower as settings have it read: `vision_feature_layer` and `vision_feature_select_strategy`, with these defaults.

    Raises ModelError for layers that there are not, for the states before the first, and for a strategy that leaves the class token in, or
    takes a patch for one.
    """
    chosen, strategy = fields.wholes("vision_feature_layer", (layer,)), fields.text("vision_feature_select_strategy", select)
    if (strategy == "default") != vit.config.class_token:
        told = "has a class token" if vit.config.class_token else "has no class token"
        raise ModelError(f"{fields.where}: vision_feature_select_strategy {strategy!r} is not supported: the vision tower {told}")
    if 0 in chosen or not chosen:
        raise fields.wrong("vision_feature_layer", "layers counted from 1, or back from -1")
    # settings count the states, of which the first is that before any layer
    return States(vit, tuple(one - 1 if one > 0 else one for one in chosen))


def projector_of(
    fields: Fields, checkpoint: Checkpoint, vision: int, language: int, dtype: torch.dtype, device: torch.device, norm: bool = False
) -> Projected:
    """The two-layer projector from features `vision` wide to embeddings `language` wide."""
    act = activation(fields.text("projector_hidden_act", "gelu"), fields.where)
    with torch.device("meta"):
        projector = TwoLayers(vision, language, act, fields.flag("multimodal_projector_bias", default=True), norm)
    return Projected(filled(projector, checkpoint.under(_PROJECTOR), dtype, device, "the projector"))


def newline_of(checkpoint: Checkpoint, width: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "1 d"]:
    """The vector that ends a row of a picture. Raises ModelError where there is none as wide as the language model."""
    if checkpoint.shape(NEWLINE) != (width,):
        raise ModelError(
            f"{checkpoint.folder}: the tensor {checkpoint.told(NEWLINE)!r} is {checkpoint.shape(NEWLINE)}, expected ({width},)"
        )
    newline = torch.empty(1, width, dtype=dtype, device=device)
    checkpoint.read(NEWLINE, newline[0])
    return newline
