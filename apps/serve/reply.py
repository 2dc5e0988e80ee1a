"""Answers in the shapes of OpenAI's API: whole, and in chunks as server-sent events."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time

from mmsdk.answer import Tokens
from mmsdk.apps.serve.refusal import RefusedError
from mmsdk.generate.logprobs import Likely, Said
from mmsdk.models.types import Tokenizer
from mmsdk.serve.engine import Event

__all__ = ["DONE", "Reply", "failed"]

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """One completion by a model: its name and moment go into everything that is said of it.

    `tokenizer` spells single tokens, of which `likeliest` are told in the place of each where it is told how likely they were.
    """

    model: str
    tokenizer: Tokenizer
    likeliest: int = 0
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time()))

    def whole(self, answers: Sequence[Sequence[Event]], tokens: Tokens) -> dict[str, object]:
        """The completion at once, each answer by its events."""
        return self._head("chat.completion") | {"choices": [self._choice(*one) for one in enumerate(answers)], "usage": _usage(tokens)}

    def chunk(self, place: int, delta: dict[str, str], logprobs: Sequence[Said] = (), finish: str | None = None) -> bytes:
        """A piece of one answer, as an event."""
        choice = {"index": place, "delta": delta, "finish_reason": finish, "logprobs": self._logprobs(logprobs)}
        return _event(self._head("chat.completion.chunk") | {"choices": [choice]})

    def usage(self, tokens: Tokens) -> bytes:
        """The last chunk, which says what it took."""
        return _event(self._head("chat.completion.chunk") | {"choices": [], "usage": _usage(tokens)})

    def _choice(self, place: int, events: Sequence[Event]) -> dict[str, object]:
        message = {"role": "assistant", "content": "".join(event.text for event in events), "refusal": None}
        logprobs = self._logprobs([one for event in events for one in event.logprobs])
        return {"index": place, "message": message, "finish_reason": str(events[-1].finish), "logprobs": logprobs}

    def _logprobs(self, said: Sequence[Said]) -> dict[str, object] | None:
        """Of every token, as OpenAI tells them; nothing where nobody asked."""
        if not said:
            return None
        told = [self._token(one) | {"top_logprobs": [self._token(other) for other in one.top[: self.likeliest]]} for one in said]
        return {"content": told, "refusal": None}

    def _token(self, one: Said | Likely) -> dict[str, object]:
        # JSON has no infinity; OpenAI's own word for what is all but impossible
        # a token may be a part of a character: its bytes can be joined, its text cannot
        spelled, logprob = self.tokenizer.spelled(one.id), max(one.logprob, -9999.0)
        return {"token": spelled.decode(errors="replace"), "logprob": logprob, "bytes": list(spelled)}

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
