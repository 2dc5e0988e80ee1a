"""The matrices of vision towers and projectors that adapters change: what PEFT calls them, and where they are here.

| there | here |
| --- | --- |
| `vision_tower.*`, `vision_model.*`: attention and MLP of `layers.{i}` (InternVL: `layer.{i}`) | `tower.blocks.{i}.*` |
| `visual.*`: attention and MLP of `blocks.{i}`, `merger.*`, `deepstack_merger_list.{j}.*` | the same, as Qwen's tower has it |
| `multi_modal_projector.*`, `connector.*` | `projector.*`, by the same names |

What sees is put on updated weights as a whole: an encoder looks at the pictures of many rows at one time, and each picture once.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from jaxtyping import Float
from torch import Tensor, nn

from mmsdk.errors import ModelError
from mmsdk.vision.anyres import AnyRes
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.clip import Clip
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.encoders.qwen_vl import QwenVL
from mmsdk.vision.encoders.siglip import Siglip
from mmsdk.vision.encoders.states import States
from mmsdk.vision.projector import Projected
from mmsdk.vision.tiled import Tiled
from mmsdk.vision.tower import Tower
from mmsdk.vision.types import VisionEncoder, VisualTokens
from mmsdk.vision.vit import ViT

Connector = Callable[[Sequence[VisualTokens]], list[Float[Tensor, "_ d"]]]

__all__ = ["Place", "place_of", "rebuilt", "sees"]

_QKV = ("q", "k", "v")
_VIT = re.compile(
    r"(?:.*\.)?(?:vision_tower|vision_model)\.(?:.*\.)?layers?\.(?P<i>0|[1-9][0-9]{0,3})"
    r"\.(?:(?:self_attn|attention)\.(?:(?P<third>[qkv])_proj|(?P<o>out_proj|projection_layer))|mlp\.fc(?P<fc>[12]))"
)
_TOWER = re.compile(
    r"(?:.*\.)?visual\.(?:blocks\.(?P<i>0|[1-9][0-9]{0,3})"
    r"\.(?:attn\.(?P<attn>qkv|proj)|mlp\.(?:linear_)?(?P<mlp>fc1|fc2|gate_proj|up_proj|down_proj))"
    r"|(?P<merger>merger|deepstack_merger_list\.[0-9]{1,3})\.(?:mlp\.(?P<number>[02])|linear_fc(?P<fc>[12])))"
)
_PROJECTOR = re.compile(r"(?:.*\.)?(?:multi_modal_projector|connector)\.(?P<name>[\w.]+)")
_HALVES: Mapping[str, str] = MappingProxyType(
    {
        "qkv": "qkv",
        "proj": "o",
        "fc1": "up",
        "fc2": "down",
        "gate_proj": "gate",
        "up_proj": "up",
        "down_proj": "down",
        "1": "up",
        "2": "down",
    }
)


@dataclass(frozen=True, slots=True)
class Place:
    """A module of ours by its name, and which of so many equal parts of its rows a matrix of PEFT's is."""

    module: str
    part: int = 0
    parts: int = 1


def place_of(module: str) -> tuple[Place, ...]:
    """Where a matrix of a vision tower or a projector is, by PEFT's name for it; nowhere for any other."""
    if found := _VIT.fullmatch(module):
        block = f"tower.blocks.{found['i']}."
        if found["third"]:
            return (Place(f"{block}qkv", _QKV.index(found["third"]), len(_QKV)),)
        return (Place(block + ("o" if found["o"] else f"mlp.{_HALVES[found['fc']]}")),)
    if found := _TOWER.fullmatch(module):
        if found["i"]:
            return (Place(f"tower.blocks.{found['i']}." + (_HALVES[found["attn"]] if found["attn"] else f"mlp.{_HALVES[found['mlp']]}")),)
        half = _HALVES[found["fc"]] if found["fc"] else ("up" if found["number"] == "0" else "down")
        return (Place(f"tower.{found['merger'].replace('deepstack_merger_list', 'deep')}.{half}"),)
    if found := _PROJECTOR.fullmatch(module):
        return (Place(f"projector.{found['name']}"),)
    return ()


def sees(encoder: VisionEncoder, connector: Connector) -> nn.ModuleDict:
    """What sees, as modules by name: the `tower` and, where there is one, the `projector`. They are the model's own, not copies."""
    found: dict[str, nn.Module] = {}
    if isinstance(encoder, QwenVL):
        found["tower"] = encoder.tower
    if isinstance(encoder, Encoder | Tiled):
        found["tower"] = encoder.backbone.vit
    if isinstance(connector, Projected):
        found["projector"] = connector.projector
    elif isinstance(encoder, Tiled) and isinstance(encoder.views, AnyRes) and isinstance(encoder.views.lift, nn.Module):
        found["projector"] = encoder.views.lift
    return nn.ModuleDict(found)


def rebuilt(encoder: VisionEncoder, connector: Connector, parts: Mapping[str, nn.Module]) -> tuple[VisionEncoder, Connector]:
    """The encoder and the connector with these in the places of their own `tower` and `projector`, as `sees` found them.

    Raises ModelError for a backbone that is no value around its transformer.
    """
    behind = isinstance(connector, Projected)
    if isinstance(connector, Projected) and "projector" in parts:
        connector = replace(connector, projector=parts["projector"])
    if "tower" not in parts:
        # an encoder that nothing is known of sees as before
        return encoder, connector
    tower = parts["tower"]
    if isinstance(encoder, QwenVL) and isinstance(tower, Tower):
        return replace(encoder, tower=tower), connector
    assert isinstance(encoder, Encoder | Tiled) and isinstance(tower, ViT), "only what these see with has modules"
    backbone = encoder.backbone
    if not isinstance(backbone, States | Clip | Siglip | Dinov2):
        raise ModelError(f"adapters cannot change a vision tower within {type(backbone).__name__}; train one without it (exclude_modules)")
    encoder = replace(encoder, backbone=replace(backbone, vit=tower))
    if isinstance(encoder, Tiled) and isinstance(encoder.views, AnyRes) and "projector" in parts and not behind:
        # planes are made of embeddings
        encoder = replace(encoder, views=replace(encoder.views, lift=parts["projector"]))
    return encoder, connector
