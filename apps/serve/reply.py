"""Answers in the shapes of OpenAI's API: whole, and in chunks as server-sent events."""

import json
import secrets
from dataclasses import dataclass, field
from time import time

from mmsdk.answer import Tokens
from mmsdk.apps.serve.refusal import RefusedError

__all__ = ["DONE", "Reply", "failed"]

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """One completion by a model: its name and moment go into everything that is said of it."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time()))

    def whole(self, text: str, finish: str, tokens: Tokens) -> dict[str, object]:
        """The completion at once."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        return self._head("chat.completion") | {"choices": [choice], "usage": _usage(tokens)}

    def chunk(self, delta: dict[str, str], finish: str | None = None) -> bytes:
        """A piece of it, as an event."""
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return _event(self._head("chat.completion.chunk") | {"choices": [choice]})

    def usage(self, tokens: Tokens) -> bytes:
        """The last chunk, which says what it took."""
        return _event(self._head("chat.completion.chunk") | {"choices": [], "usage": _usage(tokens)})

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def failed(refusal: RefusedError) -> bytes:
    """The end of a stream that fails after its beginning."""
    return _event(refusal.told)


def _usage(tokens: Tokens) -> dict[str, object]:
    """OpenAI's counts, and ours: visual tokens before and after compression. The prompt's are those that the decoder was given."""
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.generated,
        "total_tokens": tokens.prompt + tokens.generated,
        "prompt_tokens_details": {"cached_tokens": tokens.recalled},
        "visual_tokens": tokens.visual,
        "visual_tokens_kept": tokens.kept,
    }


def _event(value: object) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()
