"""Prompts as chat templates are told of them."""

from mmsdk.prompt import Prompt, Segment, Text
from mmsdk.vision.types import Image

__all__ = ["said_in"]


def said_in(prompt: Prompt) -> list[dict[str, object]]:
    """Turn by turn, who speaks and what is said or shown, as transformers takes it."""
    return [{"role": turn.role, "content": [_told(segment) for segment in turn.segments]} for turn in prompt.turns]


def _told(segment: Segment) -> dict[str, str]:
    if isinstance(segment, Text):
        return {"type": "text", "text": segment.content}
    return {"type": "image" if isinstance(segment, Image) else "video"}
