"""The language model of Qwen3-VL (arXiv 2511.21631): Qwen3, whose heads turn along time, row and column by turns."""

import dataclasses

from mmsdk.decoder.config import DecoderConfig
from mmsdk.models.text import qwen3
from mmsdk.weights.fields import Fields
from mmsdk.weights.names import HUGGINGFACE
from mmsdk.weights.sections import rope_of_sections

__all__ = ["decoder_config", "names"]

names = HUGGINGFACE


def decoder_config(fields: Fields) -> DecoderConfig:
    """From the settings of a `qwen3_vl_text` model; what is absent has the defaults of transformers' Qwen3VLTextConfig."""
    given = {name: value for name, value in fields.values.items() if value is not None}
    theta, scaling, sections = rope_of_sections(fields, context=128_000, theta=500_000.0, counts=(24, 20, 20), interleaved=True)
    # the scaling is read above, with the sections
    values = {"max_position_embeddings": 128_000, **given, "rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    config = qwen3.decoder_config(Fields(fields.where, values))
    return dataclasses.replace(config, rope_theta=theta, rope_scaling=scaling, rope_sections=sections)
