"""The language model of Qwen2-VL (arXiv 2409.12191): Qwen2, whose heads turn along time, row and column."""

import dataclasses

from mmsdk.decoder.config import DecoderConfig
from mmsdk.models.text import qwen2
from mmsdk.weights.fields import Fields
from mmsdk.weights.names import HUGGINGFACE
from mmsdk.weights.sections import rope_of_sections

__all__ = ["decoder_config", "names"]

names = HUGGINGFACE


def decoder_config(fields: Fields) -> DecoderConfig:
    """From the settings of a `qwen2_vl_text` model; what is absent has the defaults of transformers' Qwen2VLTextConfig."""
    absent = {
        "vocab_size": 152_064,
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    }
    given = {name: value for name, value in fields.values.items() if value is not None}
    theta, scaling, sections = rope_of_sections(fields, context=32_768, theta=1_000_000.0, counts=(16, 24, 24), interleaved=False)
    # the scaling is read above, with the sections
    values = {**absent, **given, "rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    config = qwen2.decoder_config(Fields(fields.where, values))
    return dataclasses.replace(config, rope_theta=theta, rope_scaling=scaling, rope_sections=sections)
