"""What checkpoints of Qwen's vision-language models have in common: how tensors and settings are named over the years.

The names that the parts are read by are those of transformers 5: `model.visual.`, `model.language_model.`, `lm_head.`. Earlier settings
hold those of the language model beside all others, not in a group of their own.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import torch

from mmsdk.errors import ModelError
from mmsdk.vision.pixels import Levels
from mmsdk.vision.smart_resize import SmartResize
from mmsdk.vision.tower import Tower, TowerActivation, TowerConfig
from mmsdk.weights.fields import Fields
from mmsdk.weights.folder import Folder
from mmsdk.weights.modules import filled
from mmsdk.weights.pictures import filter_of, levels_of
from mmsdk.weights.safetensors import Checkpoint

__all__ = ["activation_of", "nested", "renamed", "resize_of", "theta_of", "tower_of"]

VISUAL, LANGUAGE, HEAD = "model.visual.", "model.language_model.", "lm_head."

_RULES = ((r"^visual\.", VISUAL), (r"^model\.(?!visual\.|language_model\.)", LANGUAGE))
_TOWER = (
    (r"^patch_embed\.proj\.", "patch."),
    (r"^pos_embed\.", "position."),
    (r"^deepstack_merger_list\.", "deep."),
    (r"\.attn\.qkv\.", ".qkv."),
    (r"\.attn\.proj\.", ".o."),
    (r"^merger\.ln_q\.", "merger.norm."),
    (r"^merger\.mlp\.0\.", "merger.up."),
    (r"^merger\.mlp\.2\.", "merger.down."),
    (r"\.(linear_)?fc1\.", ".up."),
    (r"\.(linear_)?fc2\.", ".down."),
    (r"\.(gate|up|down)_proj\.", r".\1."),
)
_ACTIVATIONS: Mapping[str, TowerActivation] = MappingProxyType(
    {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "silu": "silu"}
)


def nested(folder: Folder, kind: str) -> Folder:
    """The same with the settings of the language model in their group, which then says what `kind` of text model it is."""
    config = folder.config
    text = config.group("text_config").values or {name: value for name, value in config.values.items() if name != "vision_config"}
    values = {**config.values, "text_config": {**text, "model_type": kind}}
    return dataclasses.replace(folder, config=Fields(config.where, values))


def renamed(folder: Folder) -> Checkpoint:
    """The tensors by their present names. Raises ModelError for any that is of no known part."""
    checkpoint = folder.checkpoint.renamed(_RULES)
    checkpoint.only(VISUAL, LANGUAGE, HEAD)
    return checkpoint


def tower_of(config: TowerConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Tower:
    """The vision tower on its tensors. Raises ModelError, naming them, for tensors that are missing, left over or of another shape."""
    with torch.device("meta"):
        tower = Tower(config)
    return filled(tower, checkpoint.under(VISUAL).renamed(_TOWER), dtype, device, "the vision tower")


def activation_of(vision: Fields, default: str) -> TowerActivation:
    """The activation by the name that settings give it. Raises ModelError for one that is not known."""
    name = vision.text("hidden_act", default)
    if name not in _ACTIVATIONS:
        raise vision.wrong("hidden_act", f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def theta_of(vision: Fields) -> float:
    """The base of the tower's rotary frequencies."""
    return vision.group("rope_parameters").real("rope_theta", 10_000.0)


def resize_of(
    settings: Fields, tower: TowerConfig, area: tuple[int, int], levels: Levels, tokens: int = 0, together: bool = False
) -> SmartResize:
    """How settings size pictures, or frames, for a tower; an `area` from and to, `levels` and `tokens` are the family's defaults.

    Raises ModelError for settings that are none, and for patches that are not the tower's.
    """
    if not settings.flag("do_resize", default=True):
        raise settings.wrong("do_resize", "true: the vision tower takes whole patches")
    for name, own in (("patch_size", tower.patch), ("temporal_patch_size", tower.time), ("merge_size", tower.merge)):
        if settings.whole(name, own) != own:
            raise settings.wrong(name, f"{own}, as its vision tower has it")
    size = settings.group("size")
    least, most = (
        settings.whole(name, size.whole(edge, size.whole(name, default)))
        for name, edge, default in (("min_pixels", "shortest_edge", area[0]), ("max_pixels", "longest_edge", area[1]))
    )
    if not 1 <= least <= most:
        raise ModelError(f"{settings.where}: pictures of {least} to {most} pixels cannot be")
    capped = settings.flag("cap_pixels_per_frame", default=False)
    return SmartResize(
        least=least,
        most=most,
        patch=tower.patch,
        merge=tower.merge,
        time=tower.time,
        together=together,
        tokens=settings.whole("max_video_tokens", tokens) if capped else 0,
        by=filter_of(settings, "bicubic"),
        levels=levels_of(settings, levels),
    )
