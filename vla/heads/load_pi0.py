"""pi0 and pi0.5 from checkpoints of openpi's PyTorch port, lerobot and transformers.

parts = load_pi0(Path("pi0_base"), torch.bfloat16)
head = FlowHead(parts.network, dims=8)
chunk = head(parts.paligemma.prefix(pixels, present, ids, said), observation)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.errors import ModelError
from mmsdk.vision.weights import vit_from_transformers
from mmsdk.vla.heads.expert import ExpertConfig
from mmsdk.vla.heads.names import Tensors, check, fill, layer_table, one_more, open_tensors
from mmsdk.vla.heads.paligemma import PaliGemma
from mmsdk.vla.heads.pi0 import Pi0, Pi0Config
from mmsdk.vla.heads.pi05 import Pi05, Pi05Config
from mmsdk.weights.fields import Fields, read_fields

__all__ = ["Pi0Parts", "load_pi0"]

# Width, layers, feed-forward width, heads, key-value heads, head width.
_GEMMA: Mapping[str, tuple[int, int, int, int, int, int]] = MappingProxyType(
    {"gemma_2b": (2048, 18, 16_384, 8, 1, 256), "gemma_300m": (1024, 18, 4096, 8, 1, 256)}
)
_SIGLIP: Mapping[str, object] = MappingProxyType(
    {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "patch_size": 14,
        "image_size": 224,
    }
)
_EMBEDDING = "vlm.language_model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Pi0Parts:
    """What makes the prefix, and what makes actions of it."""

    paligemma: PaliGemma
    network: Pi0 | Pi05


@dataclass(frozen=True, slots=True)
class _Sizes:
    vision: Mapping[str, object]
    decoder: DecoderConfig
    expert: ExpertConfig
    chunk: int
    action_dim: int
    state_dim: int


def load_pi0(folder: Path, dtype: torch.dtype = torch.float32) -> Pi0Parts:
    """Read a folder of `config.json` and safetensors; it is pi0.5 where the time has an MLP of its own.

    Raises WeightsError for files that are missing or damaged, ModelError for a config that is not supported and for tensors that are
    missing, unexpected or of the wrong shape, listing all of them.
    """
    tensors, fields = open_tensors(folder), read_fields(folder / "config.json")
    sizes = _sizes(fields, tensors)
    with torch.device("meta"):
        network, connector = _network(sizes, "time_mlp_in.weight" in tensors), _connector(sizes)
        decoder = Decoder(sizes.decoder)
    head_table, decoder_table = _head_table(network), _decoder_table(sizes.decoder.layers)
    connector_table = {name: (f"vlm.multi_modal_projector.linear.{name}",) for name in ("weight", "bias")}
    named = [name for table in (head_table, decoder_table, connector_table) for theirs in table.values() for name in theirs]
    seen = [name for name in tensors.stored if name.startswith("vlm.vision_model.")]
    check(tensors, named, spare=[*seen, "vlm.lm_head.weight"])
    network.load_state_dict(one_more(fill(network, head_table, tensors, dtype)), assign=True)
    connector.load_state_dict(fill(connector, connector_table, tensors, dtype), assign=True)
    vit = vit_from_transformers(sizes.vision, tensors.under("vlm.vision_model.", dtype), name=f"{folder} (vision tower)")
    language = Decoder.of(sizes.decoder, one_more(fill(decoder, decoder_table, tensors, dtype)))
    return Pi0Parts(PaliGemma(vit, connector, language), network.eval())


def _sizes(fields: Fields, tensors: Tensors) -> _Sizes:
    vlm, chunk = fields.group("vlm_config"), fields.whole("chunk_size", fields.whole("action_horizon", 50))
    dims = fields.whole("max_action_dim", fields.whole("action_dim", 32)), fields.whole("max_state_dim", 32)
    vocabulary = tensors.shape(_EMBEDDING)[0] if _EMBEDDING in tensors else 257_152
    if vlm.values:
        decoder, expert = _gemma(vlm.group("text_config"), vocabulary), _gemma(fields.group("dit_config"), vocabulary)
        vision = {**vlm.group("vision_config").values, "model_type": "siglip_vision_model"}
    else:
        decoder = _variant(fields, "paligemma_variant", "gemma_2b", vocabulary)
        expert = _variant(fields, "action_expert_variant", "gemma_300m", vocabulary)
        vision = {**_SIGLIP, "model_type": "siglip_vision_model"}
    shape = expert.width, expert.layers, expert.heads, expert.kv_heads, expert.head_dim, expert.inner
    return _Sizes(vision, decoder, ExpertConfig(*shape, expert.norm_eps, expert.rope_theta), chunk, *dims)


def _gemma(fields: Fields, vocabulary: int) -> DecoderConfig:
    """A Gemma config of transformers; what is absent has the defaults of its GemmaConfig."""
    if fields.text("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise fields.wrong("hidden_act", "'gelu_pytorch_tanh'")
    theta = fields.group("rope_parameters").real("rope_theta", fields.real("rope_theta", 10_000.0))
    shape = (
        fields.whole("hidden_size", 3072),
        fields.whole("num_hidden_layers", 28),
        fields.whole("intermediate_size", 24_576),
        fields.whole("num_attention_heads", 16),
        fields.whole("num_key_value_heads", 16),
        fields.whole("head_dim", 256),
    )
    config = _shaped(shape, vocabulary)
    return replace(config, norm_eps=fields.real("rms_norm_eps", 1e-6), rope_theta=theta)


def _variant(fields: Fields, name: str, default: str, vocabulary: int) -> DecoderConfig:
    variant = fields.text(name, default)
    if variant not in _GEMMA:
        raise ModelError(f"{fields.where}: {name} is {variant!r}; supported: {', '.join(_GEMMA)}")
    return _shaped(_GEMMA[variant], vocabulary)


def _shaped(shape: tuple[int, int, int, int, int, int], vocabulary: int) -> DecoderConfig:
    width, layers, inner, heads, kv_heads, head_dim = shape
    sizes = vocabulary, width, layers, heads, kv_heads, head_dim, inner
    return DecoderConfig(*sizes, context=8192, tied=True, activation="gelu_tanh", embedding_scale=width**0.5)


def _network(sizes: _Sizes, adaptive: bool) -> Pi0 | Pi05:
    if adaptive:
        return Pi05(Pi05Config(sizes.expert, sizes.chunk, sizes.action_dim))
    return Pi0(Pi0Config(sizes.expert, sizes.chunk, sizes.action_dim, sizes.state_dim))


def _connector(sizes: _Sizes) -> nn.Linear:
    width = sizes.vision.get("hidden_size")
    if not isinstance(width, int):
        raise ModelError(f"config.json gives the vision tower's hidden_size as {width!r}, expected a whole number")
    return nn.Linear(width, sizes.decoder.width)


def _decoder_table(layers: int) -> dict[str, tuple[str, ...]]:
    ends = {"embedding.weight": (_EMBEDDING,), "norm.weight": ("vlm.language_model.norm.weight",)}
    return {**ends, **layer_table("", "vlm.language_model.", layers)}


def _head_table(network: Pi0 | Pi05) -> dict[str, tuple[str, ...]]:
    expert = network.config.expert
    table = {**layer_table("expert.", "expert.", expert.layers), "expert.norm.weight": ("expert.norm.weight",)}
    table = {target: names for name, theirs in table.items() for target, names in _normed(name, theirs, expert.adaptive).items()}
    times = "time_mlp" if expert.adaptive else "action_time_mlp"
    linears = {"action_in": "action_in_proj", "time_in": f"{times}_in", "time_out": f"{times}_out", "action_out": "action_out_proj"}
    if isinstance(network, Pi0):
        linears["state_in"] = "state_proj"
    return {**table, **{f"{ours}.{kind}": (f"{theirs}.{kind}",) for ours, theirs in linears.items() for kind in ("weight", "bias")}}


def _normed(name: str, theirs: tuple[str, ...], adaptive: bool) -> dict[str, tuple[str, ...]]:
    """A norm's weight is one level deeper in ours, and adaptive ones have a matrix and a bias instead."""
    owner = name.removesuffix(".weight")
    if not owner.endswith(("norm", "norm1", "norm2")):
        return {name: theirs}
    if not adaptive:
        return {f"{owner}.norm.weight": theirs}
    source = theirs[0].removesuffix(".weight")
    return {f"{owner}.modulation.{kind}": (f"{source}.dense.{kind}",) for kind in ("weight", "bias")}
