"""Mistral (arXiv 2310.06825): Llama without biases.

Its first version attends in a sliding window. Within as many tokens as the window holds that is the same as attending to everything, and
more of them are not taken.
"""

from mmsdk.decoder.config import DecoderConfig
from mmsdk.weights.fields import Fields
from mmsdk.weights.names import HUGGINGFACE
from mmsdk.weights.rope import rope

__all__ = ["decoder_config", "names"]

names = HUGGINGFACE


def decoder_config(fields: Fields) -> DecoderConfig:
    """From the settings of a `mistral` checkpoint; what is absent has the defaults of transformers' MistralConfig."""
    heads, width = fields.whole("num_attention_heads", 32), fields.whole("hidden_size", 4096)
    theta, scaling = rope(fields, context=131_072)
    longest = fields.whole("max_position_embeddings", 131_072)
    # null is no window, where nothing at all is one of 4096
    window = fields.whole("sliding_window", longest if "sliding_window" in fields.values else 4096)
    return DecoderConfig(
        vocabulary=fields.whole("vocab_size", 32_000),
        width=width,
        layers=fields.whole("num_hidden_layers", 32),
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", 8),
        head_dim=fields.whole("head_dim", width // max(heads, 1)),
        inner=fields.whole("intermediate_size", 14_336),
        context=min(longest, window),
        norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=fields.flag("tie_word_embeddings", default=False),
    )
