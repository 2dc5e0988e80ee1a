"""DeepSeek-V4 (arXiv 2606.19348): three levels of memory, four residual streams, a mixture of experts in every layer.

    pipe = pipeline(model="folder")                      # with DeepSeek's tensor names or those of transformers
    decoder = read_decoder(folder, torch.float32)        # the decoder alone
    sizes = preset("v4-flash")                           # how large a published one is

The layer that predicts one token more (`mtp`) is left out. Checkpoints in fp8 and fp4, as DeepSeek ships them, must be converted first.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import cast

import torch

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.deepseek_v4 import DeepseekV4Decoder
from mmsdk.decoder.deepseek_v4_config import DeepseekV4Config, Kind
from mmsdk.decoder.moe import Mixture
from mmsdk.decoder.rope import Scaling
from mmsdk.errors import ModelError
from mmsdk.quant.types import Quantize
from mmsdk.weights.deepseek_v4 import put_together
from mmsdk.weights.fields import Fields, read_fields
from mmsdk.weights.rope import rope
from mmsdk.weights.safetensors import Checkpoint, open_checkpoint

__all__ = ["PRESETS", "decoder_config", "decoder_of", "preset", "read_decoder", "sizes_of"]

_KINDS: Mapping[object, Kind] = MappingProxyType(
    {
        "sliding_attention": "sliding", "compressed_sparse_attention": "csa", "heavily_compressed_attention": "hca",
        0: "sliding", 4: "csa", 128: "hca",
    }
)  # fmt: skip
_MIXERS: Mapping[object, bool] = MappingProxyType({"hash_moe": True, "moe": False})
_YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}

# The settings of the published checkpoints, as far as they differ from the family's defaults, which are Flash's sizes.
PRESETS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "v4-flash": MappingProxyType({"compress_ratios": [0, 0, 4, *[128, 4] * 20], "rope_scaling": _YARN}),
        "v4-pro": MappingProxyType(
            {
                "compress_ratios": [128, 128, 4, *[128, 4] * 29], "rope_scaling": _YARN, "num_hidden_layers": 61, "hidden_size": 7168,
                "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16, "index_topk": 1024, "n_routed_experts": 384,
                "moe_intermediate_size": 3072, "routed_scaling_factor": 2.5,
            }
        ),
    }
)  # fmt: skip


def preset(name: str) -> DeepseekV4Config:
    """The sizes of a published model, "v4-flash" (284B parameters, 13B a token) or "v4-pro" (1.6T, 49B). ModelError for others."""
    if name not in PRESETS:
        raise ModelError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return sizes_of(Fields(name, PRESETS[name]))


def sizes_of(fields: Fields) -> DeepseekV4Config:
    """From the settings of a `deepseek_v4` checkpoint; what is absent has the defaults of transformers' DeepseekV4Config."""
    layers, context, head_dim = fields.whole("num_hidden_layers", 43), fields.whole("max_position_embeddings", 1 << 20), _head_dim(fields)
    rates = fields.group("compress_rates")
    theta, compressed_theta, scaling = _ropes(fields, context)
    return DeepseekV4Config(
        vocabulary=fields.whole("vocab_size", 129_280),
        stream=fields.whole("hidden_size", 4096),
        context=context,
        kinds=_kinds(fields, layers),
        heads=fields.whole("num_attention_heads", 64),
        head_dim=head_dim,
        turning=fields.whole("qk_rope_head_dim", int(head_dim * fields.real("partial_rotary_factor", 64 / 512))),
        query_rank=fields.whole("q_lora_rank", 1024),
        groups=fields.whole("o_groups", 8),
        group_rank=fields.whole("o_lora_rank", 1024),
        index_heads=fields.whole("index_n_heads", 64),
        index_dim=fields.whole("index_head_dim", 128),
        index_topk=fields.whole("index_topk", 512),
        mixture=_mixture(fields),
        hashed=_hashed(fields, layers),
        theta=theta,
        compressed_theta=compressed_theta,
        compressed_scaling=scaling,
        window=fields.whole("sliding_window", 128),
        csa_rate=rates.whole("compressed_sparse_attention", fields.whole("compress_rate_csa", 4)),
        hca_rate=rates.whole("heavily_compressed_attention", fields.whole("compress_rate_hca", 128)),
        clamp=fields.real("swiglu_limit", 10.0),
        streams=fields.whole("hc_mult", 4),
        rounds=fields.whole("hc_sinkhorn_iters", 20),
        hyper_eps=fields.real("hc_eps", 1e-6),
        norm_eps=fields.real("rms_norm_eps", 1e-6),
        tied=fields.flag("tie_word_embeddings", default=False),
    )


def decoder_config(fields: Fields) -> DecoderConfig:
    """What any decoder is asked about, see `sizes_of`."""
    return sizes_of(fields).outline


def decoder_of(fields: Fields, checkpoint: Checkpoint, dtype: torch.dtype, quantize: Quantize = "none") -> DeepseekV4Decoder:
    """The decoder of settings and tensors; small tensors that need it stay in float32.

    Raises ModelError for a model that cannot be run, and for tensors that are missing or left over.
    """
    if fields.has("quantization_config"):
        raise ModelError(
            f"{fields.where}: DeepSeek-V4's fp8 and fp4 files (quantization_config) are not read; convert them to bfloat16 first"
        )
    return put_together(sizes_of(fields), checkpoint, dtype, quantize)


def read_decoder(folder: Path, dtype: torch.dtype, quantize: Quantize = "none") -> DeepseekV4Decoder:
    """The decoder of a folder in the Hugging Face layout. Raises as `decoder_of`, and WeightsError for missing or damaged files."""
    return decoder_of(read_fields(folder / "config.json"), open_checkpoint(folder), dtype, quantize)


def _head_dim(fields: Fields) -> int:
    if fields.whole("num_key_value_heads", 1) != 1:
        raise fields.wrong("num_key_value_heads", "1: keys and values are one shared head")
    if fields.flag("attention_bias", default=False) or fields.flag("mlp_bias", default=False):
        raise ModelError(f"{fields.where}: biases (attention_bias, mlp_bias) are not supported in this family")
    return fields.whole("head_dim", 512)


def _listed(fields: Fields, name: str, known: Mapping[object, object], layers: int) -> list[object]:
    """One entry a layer, each of which must be known; further ones (of layers that predict more tokens) are left out."""
    values = fields.values.get(name)
    fits = isinstance(values, list) and len(values) >= layers
    if not fits or any(not isinstance(value, int | str) or value not in known for value in cast(list[object], values)):
        raise fields.wrong(name, f"a list of at least {layers} of {', '.join(map(repr, known))}")
    return [known[value] for value in cast(list[object], values)[:layers]]


def _kinds(fields: Fields, layers: int) -> tuple[Kind, ...]:
    for name in ("layer_types", "compress_ratios"):
        if fields.has(name):
            return tuple(cast(list[Kind], _listed(fields, name, _KINDS, layers)))
    turns: tuple[Kind, ...] = ("hca", "csa")
    return tuple("hca" if layer < 2 else turns[layer % 2] for layer in range(layers))


def _hashed(fields: Fields, layers: int) -> tuple[int, ...]:
    if not fields.has("mlp_layer_types"):
        return tuple(range(min(layers, fields.whole("num_hash_layers", 3))))
    return tuple(layer for layer, hashed in enumerate(_listed(fields, "mlp_layer_types", _MIXERS, layers)) if hashed)


def _mixture(fields: Fields) -> Mixture:
    if fields.text("scoring_func", "sqrtsoftplus") != "sqrtsoftplus":
        raise fields.wrong("scoring_func", "'sqrtsoftplus'")
    inner = fields.whole("moe_intermediate_size", 2048)
    return Mixture(
        experts=fields.whole("n_routed_experts", 256),
        chosen=fields.whole("num_experts_per_tok", 6),
        inner=inner,
        # transformers' shared expert is one expert wide, whatever n_shared_experts says; every published checkpoint has one
        shared=inner,
        scoring="sqrt_softplus",
        balanced=True,
        normalised=True,
        scale=fields.real("routed_scaling_factor", 1.5),
    )


def _ropes(fields: Fields, context: int) -> tuple[float, float, Scaling]:
    """The base of sliding layers, and base and scaling of the others."""
    group = fields.group("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    nested = group.has("main") and group.has("compress")
    main, compress = (group.group("main"), group.group("compress")) if nested else (fields, group)
    own = {name: value for name, value in compress.values.items() if name not in ("partial_rotary_factor", "main", "compress")}
    base = compress.real("rope_theta", 160_000.0) if nested else fields.real("compress_rope_theta", 160_000.0)
    # YaRN's factor on cos and sin is left out by this family, unless a checkpoint says it.
    settings = {"attention_factor": 1.0, **own, "rope_theta": base}
    theta, scaling = rope(Fields(compress.where, {"rope_parameters": settings, "max_position_embeddings": context}), context)
    return main.real("rope_theta", 10_000.0), theta, scaling
