"""A door to a server that runs beside the tests, a way to make steps of its engine last, and what tests of a simulated robot need."""

import base64
import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from _pytest.runner import runtestprotocol
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mmsdk.apps.serve.server import serving
from mmsdk.apps.serve.service import Service
from mmsdk.serve.engine import Engine, Event
from mmsdk.vla.envs.metaworld import missing


class Door:
    """A server, asked by OpenAI's own client or by hand. Parts of a question are words, the bytes of a picture, or as OpenAI has them."""

    def __init__(self, url: str) -> None:
        self.url, self.netloc = url, urlsplit(url).netloc

    def client(self, key: str = "none", **headers: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, default_headers=headers)

    def ask(self, *parts: str | bytes | dict[str, Any], key: str = "none", **settings: Any) -> ChatCompletion:
        """The whole answer."""
        with self.client(key) as client:
            answer: ChatCompletion = client.chat.completions.create(model="small", messages=self.said(*parts), **settings)
        return answer

    def stream(self, *parts: str | bytes | dict[str, Any], key: str = "none", **settings: Any) -> list[ChatCompletionChunk]:
        """All the pieces of a stream."""
        with self.client(key) as client:
            return list(client.chat.completions.create(model="small", messages=self.said(*parts), stream=True, **settings))

    def raw(self, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, dict[str, Any]]:
        """The status and what is told."""
        connection = http.client.HTTPConnection(self.netloc, timeout=60)
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        told = json.loads(answer.read())
        connection.close()
        return answer.status, told.get("error", told)

    def metric(self, line: str) -> float:
        connection = http.client.HTTPConnection(self.netloc, timeout=60)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return next((float(one.rpartition(" ")[2]) for one in lines if one.startswith(f"{line} ")), 0.0)

    def comes(self, line: str, value: float) -> bool:
        """Whether a metric has this value within some seconds."""
        until = time.monotonic() + 60
        while self.metric(line) != value:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def free(self) -> bool:
        """Whether nothing is open or held any more, or will be within some seconds."""
        return self.comes("mmsdk_held_blocks", 0) and self.comes("mmsdk_open_requests", 0)

    @staticmethod
    def uri(data: bytes, kind: str = "image/png") -> str:
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"

    @staticmethod
    def said(*parts: str | bytes | dict[str, Any]) -> list[Any]:
        """One message of a user's."""
        return [{"role": "user", "content": [_part(part) for part in parts]}]


def _part(part: str | bytes | dict[str, Any]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": Door.uri(part)}} if isinstance(part, bytes) else part


@pytest.fixture(scope="session")
def door() -> Callable[[Service], AbstractContextManager[Door]]:
    """A function that serves for the time of a `with`."""

    @contextmanager
    def opened(service: Service) -> Iterator[Door]:
        with serving(service) as url:
            yield Door(url)

    return opened


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes long enough that something can happen between two of them."""
    original = Engine.step

    def waiting(engine: Engine) -> list[Event]:
        time.sleep(0.03)
        return original(engine)

    monkeypatch.setattr(Engine, "step", waiting)


@pytest.fixture
def simulated() -> None:
    """Where robots can be simulated; elsewhere the test is skipped with the reason, and fails where CI is set."""
    lacks = missing()
    if lacks:
        if os.environ.get("CI"):
            pytest.fail(lacks)
        pytest.skip(lacks)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A browser on a busy machine loses a click now and then: what it fails at is tried again, and what fails three times is broken."""
    if item.path.name != "test_demo_web.py":
        return None
    assert isinstance(item, pytest.Function)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for left in (2, 1, 0):
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if not left or not any(report.failed for report in reports):
            break
        item._initrequest()
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
