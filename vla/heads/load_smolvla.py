"""SmolVLA from a checkpoint of lerobot.

Its config names the vision-language model that it was cut from instead of giving sizes; those of SmolVLM2-500M are the defaults here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.vision.weights import vit_from_transformers
from mmsdk.vla.heads.names import check, fill, layer_table, open_tensors
from mmsdk.vla.heads.smolvla import SmolVLA, SmolVLAConfig
from mmsdk.vla.heads.smolvlm import SmolVLM

__all__ = ["SmolVLAParts", "SmolVLASizes", "load_smolvla"]

_EMBEDDING, _HEAD = "vlm.language_model.embed_tokens.weight", "vlm.lm_head.weight"


def _smolvlm_vision() -> dict[str, object]:
    return {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "patch_size": 16,
        "image_size": 512,
    }


@dataclass(frozen=True, slots=True)
class SmolVLASizes:
    """The shape of the three parts. The decoder's rotations have base 10,000 whatever SmolLM2 was trained with, as in lerobot."""

    network: SmolVLAConfig = SmolVLAConfig()
    decoder: DecoderConfig = DecoderConfig(49_280, 960, 16, 15, 5, 64, 2560, 8192, 1e-5, embedding_scale=960**0.5)
    vision: Mapping[str, object] = field(default_factory=_smolvlm_vision)
    shuffle: int = 4


@dataclass(frozen=True, slots=True)
class SmolVLAParts:
    """What makes the prefix, and what makes actions of it."""

    smolvlm: SmolVLM
    network: SmolVLA


def load_smolvla(folder: Path, dtype: torch.dtype = torch.float32, sizes: SmolVLASizes = SmolVLASizes()) -> SmolVLAParts:
    """Read a folder of safetensors.

    Raises WeightsError for files that are missing or damaged, ModelError for tensors that are missing, unexpected or of the wrong shape,
    listing all of them.
    """
    tensors = open_tensors(folder)
    config = replace(sizes.decoder, tied=_HEAD not in tensors)
    shuffled = sizes.shuffle**2 * int(str(sizes.vision["hidden_size"]))
    with torch.device("meta"):
        blank, connector = Decoder(config), nn.Linear(shuffled, config.width, bias=False)
    decoder_table, head_table = _decoder_table(config), _head_table(sizes.network)
    connector_table = {"weight": ("vlm.connector.modality_projection.proj.weight",)}
    named = [name for table in (decoder_table, head_table, connector_table) for theirs in table.values() for name in theirs]
    check(tensors, named, spare=[name for name in tensors.stored if name.startswith("vlm.vision_model.")])
    decoder = Decoder.of(config, fill(blank, decoder_table, tensors, dtype))
    connector.load_state_dict(fill(connector, connector_table, tensors, dtype), assign=True)
    with torch.device("meta"):
        network = SmolVLA(decoder, sizes.network)
    network.load_state_dict(fill(network, head_table, tensors, dtype), assign=True)
    vision = {**sizes.vision, "model_type": "siglip_vision_model"}
    vit = vit_from_transformers(vision, tensors.under("vlm.vision_model.", dtype), name=f"{folder} (vision model)")
    return SmolVLAParts(SmolVLM(vit, connector, decoder, sizes.shuffle), network.eval())


def _decoder_table(config: DecoderConfig) -> dict[str, tuple[str, ...]]:
    ends = {"embedding.weight": (_EMBEDDING,), "norm.weight": ("vlm.language_model.norm.weight",)}
    head = {} if config.tied else {"head.weight": (_HEAD,)}
    return {**ends, **head, **layer_table("", "vlm.language_model.", config.layers)}


def _head_table(config: SmolVLAConfig) -> dict[str, tuple[str, ...]]:
    table = {**layer_table("", "expert.", config.expert.layers), "norm.weight": ("expert.norm.weight",)}
    for layer in range(config.expert.layers):
        if layer % config.joint_every:
            # A reading layer keeps its three projections apart: two of them have the decoder's cache for input.
            for name, theirs in zip("qkv", table.pop(f"layers.{layer}.attention.qkv.weight"), strict=True):
                table[f"layers.{layer}.attention.{name}.weight"] = (theirs,)
    linears = {
        "state_in": "state_proj",
        "action_in": "action_in_proj",
        "time_in": "action_time_mlp_in",
        "time_out": "action_time_mlp_out",
        "action_out": "action_out_proj",
    }
    return {**table, **{f"{ours}.{kind}": (f"{theirs}.{kind}",) for ours, theirs in linears.items() for kind in ("weight", "bias")}}
