"""Gemma (arXiv 2403.08295): GeGLU, norms whose weights say how far they are from one, words scaled by the root of the width."""

import math

from mmsdk.decoder.config import DecoderConfig
from mmsdk.weights.fields import Fields
from mmsdk.weights.names import HUGGINGFACE
from mmsdk.weights.rope import rope

__all__ = ["decoder_config", "names"]

names = HUGGINGFACE


def decoder_config(fields: Fields) -> DecoderConfig:
    """From the settings of a `gemma` checkpoint; what is absent has the defaults of transformers' GemmaConfig."""
    width = fields.whole("hidden_size", 3072)
    theta, scaling = rope(fields, context=8192)
    return DecoderConfig(
        vocabulary=fields.whole("vocab_size", 256_000),
        width=width,
        layers=fields.whole("num_hidden_layers", 28),
        heads=fields.whole("num_attention_heads", 16),
        kv_heads=fields.whole("num_key_value_heads", 16),
        head_dim=fields.whole("head_dim", 256),
        inner=fields.whole("intermediate_size", 24_576),
        context=fields.whole("max_position_embeddings", 8192),
        norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=fields.flag("attention_bias", default=False),
        o_bias=fields.flag("attention_bias", default=False),
        tied=fields.flag("tie_word_embeddings", default=True),
        activation="gelu_tanh",
        embedding_scale=math.sqrt(max(width, 1)),
        norm_offset=1.0,
    )
