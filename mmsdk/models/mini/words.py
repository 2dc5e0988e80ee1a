"""The words around a question, and the ids that begin and end a text: the same where mini is trained and where it answers."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mmsdk.weights.bundle import adapter_name

__all__ = ["ADAPTER", "BOS", "EOS", "MARKERS", "asked", "conversation"]

ADAPTER = adapter_name("mini")
"""The file that training writes and `load` reads."""

BOS, EOS = 1, 2
MARKERS: Mapping[str, int] = MappingProxyType({"<|im_start|>": BOS, "<|im_end|>": EOS})
"""What the language model calls these ids."""


def asked(question: str) -> str:
    """A question as the model reads it, after the pictures; its answer follows after a space."""
    return f"Question: {question}\nAnswer:"


def conversation(turns: Sequence[tuple[str, str]]) -> str:
    """Turns, each its role and its words, in the same words: every answer behind its question, and the system's on a line of its own.

    Training has only ever asked one question, so that mini makes little of those before the last.
    """
    lines = [asked(words) if role == "user" else f" {words}" if role == "assistant" else words for role, words in turns]
    breaks = ["" if not place or role == "assistant" else "\n" for place, (role, _) in enumerate(turns)]
    return "".join(f"{before}{line}" for before, line in zip(breaks, lines, strict=True))
