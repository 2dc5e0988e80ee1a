"""The words around a question, and the ids that begin and end a text: the same where mini is trained and where it answers."""

from collections.abc import Mapping
from types import MappingProxyType

from mmsdk.weights.bundle import adapter_name

__all__ = ["ADAPTER", "BOS", "EOS", "MARKERS", "asked"]

ADAPTER = adapter_name("mini")
"""The file that training writes and `load` reads."""

BOS, EOS = 1, 2
MARKERS: Mapping[str, int] = MappingProxyType({"<|im_start|>": BOS, "<|im_end|>": EOS})
"""What the language model calls these ids."""


def asked(question: str) -> str:
    """A question as the model reads it, after the pictures; its answer follows after a space."""
    return f"Question: {question}\nAnswer:"
