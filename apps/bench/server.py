"""Server: OpenAI's client many times at once, some of which leave early or ask nonsense: answers lost, blocks left, memory grown."""

import base64
import http.client
import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import PIL.Image

from mmsdk.apps.console import Cell
from mmsdk.errors import InputError, MmsdkError

__all__ = ["Load"]

MALFORMED = (
    b"{",
    b"[]",
    b'{"model": "MODEL"}',
    b'{"model": "MODEL", "messages": [{"role": "user", "content": 5}]}',
    b'{"model": "MODEL", "messages": [{"role": "user", "content": "Hi?"}], "temperature": -1}',
    b'{"model": "MODEL", "messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, '
    b'{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]}',
)
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"thing": {"type": "string", "maxLength": 8}, "colour": {"enum": ["red", "green", "blue"]}},
    "required": ["thing", "colour"],
    "additionalProperties": False,
}
CLIP = Path(__file__).parents[1] / "media" / "motion.mp4"
PICTURES = 32  # different ones: what is remembered of them has a bound, which a warm-up is to reach
PATIENCE = 30.0  # seconds for everything to be freed once the last client is gone


@dataclass(frozen=True, slots=True)
class Asking:
    """Who asks what: `requests` of clients, `concurrency` at a time; so many of them leave early, or ask nonsense."""

    requests: int = 200
    concurrency: int = 16
    cancelled: int = 20
    malformed: int = 20
    tokens: int = 24

    def __post_init__(self) -> None:
        if min(self.requests, self.concurrency, self.tokens) < 1 or min(self.cancelled, self.malformed) < 0:
            raise InputError("requests, concurrency and tokens are at least 1, cancelled and malformed at least 0", item="asking")
        if self.cancelled + self.malformed >= self.requests:
            raise InputError(f"no request of {self.requests} is left that wants an answer", item="requests")

    @property
    def kinds(self) -> list[str]:
        """What becomes of each request, in an order that is drawn and always the same."""
        answered = self.requests - self.malformed - self.cancelled
        kinds = ["malformed"] * self.malformed + ["cancelled"] * self.cancelled + ["answered"] * answered
        return [kinds[place] for place in np.random.default_rng(0).permutation(self.requests)]


@dataclass(frozen=True, slots=True)
class Load:
    """A server of mini in a process of its own, warmed up by `warm` requests, with room for `pool` tokens.

    Questions are about a picture of noise, two, a clip or nothing; every other answer comes as a stream, and every fifth is JSON of a
    schema. It needs the extras serve, structured and video, and the package openai.
    """

    requests: int = 200
    concurrency: int = 16
    cancelled: int = 20
    malformed: int = 20
    tokens: int = 24
    warm: int = 256
    pool: int = 4096
    model: str = "mini"

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {requests, concurrency, cancelled, malformed, lost, leaked_blocks, p95_ttft_ms, rss_growth_mb}.

        Lost is who wanted an answer and got none that is whole, or asked nonsense and was not told so (400). Of who leaves, half do after
        the first token and half before. Memory is the server's resident memory, compared with that after the warm-up, which is long enough
        for what is remembered of prompts and pictures to reach its bounds. What comes after it is what the system's allocator keeps of what
        was freed, in an area of each thread: it comes ever more slowly, and the program's own objects stay as many as they were.
        """
        asking = Asking(self.requests, self.concurrency, self.cancelled, self.malformed, self.tokens)
        with _server(self.model, self.concurrency, self.pool) as url:
            measured(url, self.model, Asking(max(1, self.warm), self.concurrency, 0, 0, self.tokens))
            return [measured(url, self.model, asking)]


def measured(url: str, model: str, asking: Asking) -> dict[str, Cell]:
    """The row of a server at `url`, which nobody else asks meanwhile."""
    before = _metric(url, "process_resident_memory_bytes")
    with ThreadPoolExecutor(asking.concurrency) as threads, _client(url) as client:
        made = [threads.submit(_ask, client, url, model, kind, asking.tokens, number) for number, kind in enumerate(asking.kinds)]
        ended = [one.result() for one in made]
    until = time.monotonic() + PATIENCE
    while (_metric(url, "mmsdk_open_requests") or _metric(url, "mmsdk_held_blocks")) and time.monotonic() < until:
        time.sleep(0.02)
    firsts = [first for _, first in ended if first is not None]
    return {
        "requests": asking.requests,
        "concurrency": asking.concurrency,
        "cancelled": asking.cancelled,
        "malformed": asking.malformed,
        "lost": sum(not well for well, _ in ended),
        "leaked_blocks": int(_metric(url, "mmsdk_held_blocks")),
        "p95_ttft_ms": 1000 * float(np.percentile(firsts, 95)) if firsts else None,
        "rss_growth_mb": (_metric(url, "process_resident_memory_bytes") - before) / 2**20,
    }


def _ask(client: Any, url: str, model: str, kind: str, tokens: int, number: int) -> tuple[bool, float | None]:
    """Whether all went as it should, and the seconds to the first token of a stream."""
    if kind == "malformed":
        return _told(url, MALFORMED[number % len(MALFORMED)].replace(b"MODEL", model.encode())), None
    began, openai = time.perf_counter(), _openai()
    settings: dict[str, Any] = {"model": model, "messages": _messages(number), "max_tokens": tokens, "seed": number}
    if number % 5 == 0:
        settings |= {"max_tokens": max(tokens, 40), "temperature": 1.0}
        settings["response_format"] = {"type": "json_schema", "json_schema": {"name": "seen", "schema": FORM, "strict": True}}
    try:
        if number % 2 and kind == "cancelled":
            client.with_options(timeout=0.1).chat.completions.create(**settings)
            return True, None
        if number % 2:
            choice = client.chat.completions.create(**settings).choices[0]
            return _whole(choice.message.content, choice.finish_reason, number), None
        first, text, finish = None, "", ""
        with client.chat.completions.create(**settings, stream=True) as chunks:
            for chunk in chunks:
                first = first or time.perf_counter() - began
                if kind == "cancelled":
                    return True, first
                text, finish = text + (chunk.choices[0].delta.content or ""), chunk.choices[0].finish_reason or finish
        return _whole(text, finish, number), first
    except openai.APITimeoutError:
        return kind == "cancelled", None
    except openai.APIError:
        return False, None


def _whole(text: str, finish: str, number: int) -> bool:
    """Whether an answer came to its end, and in the form that was asked for."""
    if number % 5 or finish == "length":
        return finish in ("stop", "length")
    try:
        return finish == "stop" and set(json.loads(text)) == {"thing", "colour"}
    except ValueError:
        return False


def _told(url: str, body: bytes) -> bool:
    """Whether who sends this is told that it is no request."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status == 400 and "error" in json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


def _messages(number: int) -> list[dict[str, Any]]:
    words = {"type": "text", "text": f"Question {number}: describe what can be seen, and which colours it has."}
    shown: list[dict[str, Any]] = [_picture(number + place) for place in range(number % 4 % 3)]
    if number % 4 == 3:
        clip = f"data:video/mp4;base64,{base64.b64encode(CLIP.read_bytes()).decode()}"
        shown = [{"type": "video_url", "video_url": {"url": clip}}]
    return [{"role": "user", "content": [*shown, words]}]


def _picture(number: int) -> dict[str, Any]:
    pixels = np.random.default_rng(number % PICTURES).integers(0, 256, (96, 128, 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}}


def _metric(url: str, name: str) -> float:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    # where the system tells nothing of its processes, nothing grows
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0.0)


def _client(url: str) -> Any:
    """OpenAI's own, which asks once; an address with its path is taken as it is."""
    base = url if urlsplit(url).path else f"{url}/v1"
    return _openai().OpenAI(base_url=base, api_key="none", max_retries=0, timeout=600)


def _openai() -> ModuleType:
    # here and not above: benches are listed where it is not installed, too
    try:
        import openai
    except ModuleNotFoundError:
        raise MmsdkError("this bench asks by OpenAI's own client: pip install openai") from None
    return openai


@contextmanager
def _server(model: str, concurrency: int, pool: int) -> Iterator[str]:
    """The command in a process of its own, for the time of a `with`. Raises MmsdkError where it does not begin or end in order."""
    words = ["serve", "--model", model, "--name", model, "--port", "0", "--waiting", str(concurrency), "--pool", str(pool), "--json"]
    with subprocess.Popen([sys.executable, "-m", "mmsdk.apps.entry", *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline() or "{}")
        try:
            if "url" not in told:
                raise MmsdkError(f"the server did not begin: {told.get('error', {}).get('message', 'see above')}")
            yield str(told["url"])
        finally:
            process.terminate()
    if process.returncode:
        raise MmsdkError(f"the server ended with {process.returncode}")
