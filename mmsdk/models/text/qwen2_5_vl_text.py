"""The language model of Qwen2.5-VL (arXiv 2502.13923): that of Qwen2-VL."""

from mmsdk.models.text.qwen2_vl_text import decoder_config, names

__all__ = ["decoder_config", "names"]
