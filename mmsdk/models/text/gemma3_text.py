"""Gemma 3 (arXiv 2503.19786): Gemma with norms on both sides, over heads too, and five local layers to each that sees everything."""

import dataclasses
import math
from types import MappingProxyType

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.sight import Local
from mmsdk.errors import ModelError
from mmsdk.weights.fields import Fields
from mmsdk.weights.names import HUGGINGFACE
from mmsdk.weights.rope import rope

__all__ = ["decoder_config", "names"]

_LAYER = "model.layers.{i}."
names = dataclasses.replace(
    HUGGINGFACE,
    weights=MappingProxyType(
        {
            **HUGGINGFACE.weights,
            "post1": (_LAYER + "post_attention_layernorm",),
            "norm2": (_LAYER + "pre_feedforward_layernorm",),
            "post2": (_LAYER + "post_feedforward_layernorm",),
        }
    ),
)


def decoder_config(fields: Fields) -> DecoderConfig:
    """From the settings of a `gemma3_text` checkpoint; what is absent has the defaults of transformers' Gemma3TextConfig."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.has(name):
            raise fields.wrong(name, "absent: scores are not capped")
    if fields.flag("use_bidirectional_attention", default=False):
        raise ModelError(f"{fields.where}: attention in both directions (use_bidirectional_attention) is not supported")
    width, head, layers = fields.whole("hidden_size", 2304), fields.whole("head_dim", 256), fields.whole("num_hidden_layers", 26)
    turned = fields.group("rope_parameters")
    whole = turned.group("full_attention").values or fields.group("rope_scaling").values
    theta, scaling = rope(
        Fields(fields.where, {**fields.values, "rope_parameters": {"rope_theta": fields.real("rope_theta", 1e6), **whole}}), 131_072
    )
    local = turned.group("sliding_attention").real("rope_theta", fields.real("rope_local_base_freq", 10_000.0))
    return DecoderConfig(
        vocabulary=fields.whole("vocab_size", 262_208),
        width=width,
        layers=layers,
        heads=fields.whole("num_attention_heads", 8),
        kv_heads=fields.whole("num_key_value_heads", 4),
        head_dim=head,
        inner=fields.whole("intermediate_size", 9216),
        context=fields.whole("max_position_embeddings", 131_072),
        norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=fields.flag("attention_bias", default=False),
        o_bias=fields.flag("attention_bias", default=False),
        qk_norm=True,
        tied=fields.flag("tie_word_embeddings", default=True),
        activation="gelu_tanh",
        embedding_scale=math.sqrt(max(width, 1)),
        norm_offset=1.0,
        post_norms=True,
        query_scale=math.sqrt(head / fields.real("query_pre_attn_scalar", 256.0)),
        local=Local(_sliding(fields, layers), fields.whole("sliding_window", 4096), local),
    )


def _sliding(fields: Fields, layers: int) -> tuple[int, ...]:
    """The layers with a window: as listed, or all but each sixth."""
    kinds = fields.values.get("layer_types")
    if not isinstance(kinds, list):
        every = fields.whole("sliding_window_pattern", 6)
        return tuple(layer for layer in range(layers) if (layer + 1) % max(every, 1))
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise fields.wrong("layer_types", f"{layers} of 'sliding_attention' and 'full_attention'")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
