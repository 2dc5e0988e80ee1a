"""Qwen2 and Qwen2.5 (arXiv 2407.10671): biases on queries, keys and values."""

from mmsdk.decoder.config import DecoderConfig
from mmsdk.weights.fields import Fields
from mmsdk.weights.names import HUGGINGFACE
from mmsdk.weights.rope import rope

__all__ = ["decoder_config", "names"]

names = HUGGINGFACE


def decoder_config(fields: Fields) -> DecoderConfig:
    """From the settings of a `qwen2` checkpoint; what is absent has the defaults of transformers' Qwen2Config."""
    heads, width = fields.whole("num_attention_heads", 32), fields.whole("hidden_size", 4096)
    theta, scaling = rope(fields, context=32_768)
    return DecoderConfig(
        vocabulary=fields.whole("vocab_size", 151_936),
        width=width,
        layers=fields.whole("num_hidden_layers", 32),
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", 32),
        head_dim=fields.whole("head_dim", width // max(heads, 1)),
        inner=fields.whole("intermediate_size", 22_016),
        context=fields.whole("max_position_embeddings", 32_768),
        norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=True,
        tied=fields.flag("tie_word_embeddings", default=False),
    )
