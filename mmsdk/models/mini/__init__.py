"""`mini`, the default vision-language model: DINOv2-small, a projector trained here, and SmolLM2-135M-Instruct."""

from mmsdk.models.mini.family import load

__all__ = ["load"]
