"""Server: many clients at a time, some of which leave early and some of which ask nonsense: answers lost, blocks left, memory grown."""

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
PATIENCE = 30.0  # seconds for everything to be freed once the last client is gone


@dataclass(frozen=True, slots=True)
class Asking:
    """Who asks what: `requests` of clients, `concurrency` at a time; so many of them leave after the first token, or ask nonsense."""

    requests: int = 200
    concurrency: int = 16
    cancelled: int = 20
    malformed: int = 20
    tokens: int = 32

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
    """A server of mini in a process of its own, warmed up by `warm` requests. Two thirds of the questions are about a picture of noise."""

    requests: int = 200
    concurrency: int = 16
    cancelled: int = 20
    malformed: int = 20
    tokens: int = 32
    warm: int = 200
    model: str = "mini"

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {requests, concurrency, cancelled, malformed, lost, leaked_blocks, p95_ttft_ms, rss_growth_mb}.

        Lost is who wanted an answer and got none that is whole, or asked nonsense and was not told so (400). Memory is the server's
        resident memory, compared with that after the warm-up, which is long enough for what is remembered of prompts to fill its pool:
        that has a bound, and what comes after it is growth.
        """
        asking = Asking(self.requests, self.concurrency, self.cancelled, self.malformed, self.tokens)
        with _server(self.model, self.concurrency) as url:
            measured(url, self.model, Asking(max(1, self.warm), self.concurrency, 0, 0, self.tokens))
            return [measured(url, self.model, asking)]


def measured(url: str, model: str, asking: Asking) -> dict[str, Cell]:
    """The row of a server at `url`, which nobody else asks meanwhile."""
    before = _metric(url, "process_resident_memory_bytes")
    with ThreadPoolExecutor(asking.concurrency) as clients:
        ended = list(clients.map(lambda kind, number: _ask(url, model, kind, asking.tokens, number), asking.kinds, range(asking.requests)))
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


def _ask(url: str, model: str, kind: str, tokens: int, number: int) -> tuple[bool, float | None]:
    """Whether all went as it should, and the seconds to the first token where there was one."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    broken = MALFORMED[number % len(MALFORMED)].replace(b"MODEL", model.encode())
    body = broken if kind == "malformed" else _body(model, tokens, number)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if kind == "malformed":
            return answer.status == 400 and "error" in json.loads(answer.read()), None
        first, whole = None, False
        for line in answer:
            if line.startswith(b"data: "):
                first = time.perf_counter() - began if first is None else first
                if kind == "cancelled":
                    return True, first
                whole = whole or line.strip() == b"data: [DONE]"
        return answer.status == 200 and whole, first
    except (OSError, http.client.HTTPException):
        return False, None
    finally:
        connection.close()


def _body(model: str, tokens: int, number: int) -> bytes:
    words = {"type": "text", "text": f"Question {number}: describe what can be seen, and which colours it has."}
    content: list[dict[str, object]] = [{**words}]
    if number % 3:
        content.insert(0, {"type": "image_url", "image_url": {"url": _picture(number)}})
    request = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": tokens, "stream": True, "seed": number}
    return json.dumps(request).encode()


def _picture(number: int) -> str:
    pixels = np.random.default_rng(number).integers(0, 256, (96, 128, 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _metric(url: str, name: str) -> float:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    # where the system tells nothing of its processes, nothing grows
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0.0)


@contextmanager
def _server(model: str, concurrency: int) -> Iterator[str]:
    """The command in a process of its own, for the time of a `with`. Raises MmsdkError where it does not begin or end in order."""
    words = ["serve", "--model", model, "--name", model, "--port", "0", "--waiting", str(concurrency), "--json"]
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
