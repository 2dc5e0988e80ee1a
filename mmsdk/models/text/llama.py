"""Llama: no switch on; biases where the checkpoint says so."""

from mmsdk.decoder.config import DecoderConfig
from mmsdk.weights.fields import Fields
from mmsdk.weights.names import HUGGINGFACE
from mmsdk.weights.rope import rope

__all__ = ["decoder_config", "names"]

names = HUGGINGFACE


def decoder_config(fields: Fields) -> DecoderConfig:
    """From the settings of a `llama` checkpoint; what is absent has the defaults of transformers' LlamaConfig."""
    heads, width = fields.whole("num_attention_heads", 32), fields.whole("hidden_size", 4096)
    theta, scaling = rope(fields, context=2048)
    return DecoderConfig(
        vocabulary=fields.whole("vocab_size", 32_000),
        width=width,
        layers=fields.whole("num_hidden_layers", 32),
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=fields.whole("head_dim", width // max(heads, 1)),
        inner=fields.whole("intermediate_size", 11_008),
        context=fields.whole("max_position_embeddings", 2048),
        norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=fields.flag("attention_bias", default=False),
        o_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        tied=fields.flag("tie_word_embeddings", default=False),
    )
