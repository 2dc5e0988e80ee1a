"""`mmsdk serve` and those who ask at one time: tenants, seats, clients that leave, time that is over, and its end. Over real sockets."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mmsdk.apps.serve import completion
from mmsdk.apps.serve import server as serving
from mmsdk.apps.serve.form import form_of
from mmsdk.apps.serve.reply import Reply
from mmsdk.apps.serve.service import Service
from mmsdk.apps.serve.settings import Settings
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.serve.engine import Engine, Event

SCENE = Path(__file__).parents[2] / "apps" / "media" / "scene.png"
LONG = "Say on and on."  # the small model never ends by itself
HI: list[Any] = [{"role": "user", "content": "Hi?"}]
Doors = Callable[[Service], AbstractContextManager[Any]]


def test_keys_are_wanted_and_those_of_one_share_nothing_with_another(small: Mini, door: Doors) -> None:
    """CS-07: a prompt that one tenant has asked is found again by nobody else."""
    words = "Is there anything that can be told of it, and if so, what would that be? " * 3
    with door(Service(Pipeline(small), Settings(keys=("one", "two")))) as server:
        for key in ("three", "on", "one two"):
            told = pytest.raises(openai.AuthenticationError, match="the key that was brought is not one of this server's")
            with told, server.client(key) as asking:
                asking.models.list()
        for header in ({}, {"Authorization": "Basic one"}, {"Authorization": "Bearer "}):
            status, error = server.raw(b"{}", **header)
            assert (status, error["message"]) == (401, "this server wants a key: Authorization: Bearer ...")
        usages = [server.ask(words, key=key, max_tokens=1).usage for key in ("one", "one", "two")]
        cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
        connection = http.client.HTTPConnection(server.netloc)
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read()) == {"status": "ok", "open_requests": 0}
        # of two keys, another program might have looked at the other one
        connection.putrequest("GET", "/v1/models")
        for key in ("one", "two"):
            connection.putheader("Authorization", f"Bearer {key}")
        connection.endheaders()
        assert connection.getresponse().status == 401
        connection.close()
    assert cached[0] == cached[2] == 0 < (cached[1] or 0)


def test_a_tenant_that_asks_for_what_takes_long_holds_up_nobody_else(small: Mini, door: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six forms, of which two take longer to compile than they may and keep the tenant's threads; beside them its own plain question and
    the other tenant's form."""
    going, tenants = threading.Event(), list[str]()

    def compiled(request: Any, answers: int, vlm: Any, tenant: str) -> Any:
        tenants.append(tenant)
        if tenant == tenants[0]:
            going.wait(60)
        return form_of(request, answers, vlm, tenant)

    monkeypatch.setattr(completion, "form_of", compiled)
    form = {"extra_body": {"guided_choice": ["yes", "no"]}, "max_tokens": 4}
    with door(Service(Pipeline(small), Settings(keys=("one", "two"), forming=3))) as server, ThreadPoolExecutor(6) as pool:
        slow = [pool.submit(server.ask, "Hi?", key="one", **form) for _ in range(6)]
        assert server_open(server, 6)
        assert server.ask("Hi?", key="one", max_tokens=4).choices, "what wants no form waits for none"
        assert server.ask("Hi?", key="two", **form).choices[0].message.content in ("yes", "no")
        refused = list(islice(as_completed(slow, 60), 2))
        for one in refused:
            error = one.exception()
            assert isinstance(error, openai.BadRequestError) and error.code == "form_too_costly"
        assert tenants.count(tenants[0]) == 2, "the others wait for a thread"
        time.sleep(0.5)
        assert sum(one.done() for one in slow) == 2, "which is no time of theirs"
        going.set()
        answers = [one.result(60).choices[0].message.content for one in slow if one not in refused]
        assert len(answers) == 4 and set(answers) <= {"yes", "no"}
        assert server.ask("Hi?", key="one", **form).choices[0].message.content in ("yes", "no")


def test_who_finds_no_thread_for_a_form_is_told_to_come_back(small: Mini, door: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the time of the request is over: 429, with the time to wait, and not 504."""
    going = threading.Event()

    def compiled(*given: Any) -> Any:
        going.wait(60)
        return form_of(*given)

    monkeypatch.setattr(completion, "form_of", compiled)
    form = {"extra_body": {"guided_choice": ["yes", "no"]}, "max_tokens": 4}
    with door(Service(Pipeline(small), Settings(forming=0.2, seconds=300))) as server, ThreadPoolExecutor(3) as pool:
        errors = [one.exception(60) for one in [pool.submit(server.ask, "Hi?", **form) for _ in range(3)]]
        going.set()
        codes = sorted(error.code for error in errors if isinstance(error, openai.APIStatusError) and error.code)
        assert codes == ["form_too_costly", "form_too_costly", "too_many_requests"]
        (late,) = (error for error in errors if isinstance(error, openai.RateLimitError))
        assert late.response.headers["retry-after"] == "1" and "threads for forms" in late.message


def server_open(server: Any, count: int) -> bool:
    """Whether so many requests are open within some seconds."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        connection = http.client.HTTPConnection(server.netloc)
        connection.request("GET", "/health")
        found = json.loads(connection.getresponse().read())["open_requests"]
        connection.close()
        if found == count:
            return True
        time.sleep(0.01)
    return False


def test_one_tenant_cannot_take_all_seats(small: Mini, door: Doors, slow: None) -> None:
    with door(Service(Pipeline(small), Settings(rows=1, waiting=1, keys=("one", "two")))) as server, server.client("one") as asking:
        with asking.chat.completions.create(model="small", messages=server.said(LONG), stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError):
                server.ask("Hi?", key="one")
            waits = server.client("two")
            with pytest.raises(openai.APITimeoutError), waits:
                waits.with_options(timeout=0.2).chat.completions.create(model="small", messages=HI)
        assert server.ask("Hi?", key="two", max_tokens=1).choices


@pytest.mark.parametrize("stream", [False, True])
def test_cs_11_a_client_that_leaves_frees_what_it_held(small: Mini, door: Doors, slow: None, stream: bool) -> None:
    with door(Service(Pipeline(small), Settings(rows=1, tokens=400))) as server, ExitStack() as stack:
        gone, waits = (stack.enter_context(closing(http.client.HTTPConnection(server.netloc))) for _ in range(2))
        said = server.said(SCENE.read_bytes(), LONG)
        body = json.dumps({"model": "small", "messages": said, "max_tokens": 400, "stream": stream})
        gone.request("POST", "/v1/chat/completions", body)
        until = time.monotonic() + 60
        while server.metric("mmsdk_held_blocks") == 0 and time.monotonic() < until:
            time.sleep(0.01)
        # after the other has the only row, so that it is this one that waits
        waits.request("POST", "/v1/chat/completions", body)
        if stream:
            assert gone.getresponse().readline().startswith(b"data: ")
        assert server.metric("mmsdk_held_blocks") > 0 and server.comes("mmsdk_open_requests", 2)
        waits.close()
        assert server.comes('mmsdk_requests_total{status="499"}', 1)
        gone.close()
        assert server.free()
        assert server.metric('mmsdk_requests_total{status="499"}') == 2 and server.metric('mmsdk_requests_total{status="200"}') == 0
        assert server.ask("Hi?", max_tokens=2).usage


def test_who_finds_no_room_is_told_to_come_back(small: Mini, door: Doors, slow: None) -> None:
    """Also who wants several answers, each of which takes the place of a request."""
    with door(Service(Pipeline(small), Settings(rows=2, waiting=0))) as server, server.client() as asking:
        assert len(server.ask("Hi?", n=2, max_tokens=1).choices) == 2
        with asking.chat.completions.create(model="small", messages=HI, max_tokens=200, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as refused:
                server.ask("Hi?", n=2, max_tokens=1)
        assert refused.value.response.headers["retry-after"] == "1"
        assert server.comes("mmsdk_open_requests", 0) and server.ask("Hi?", max_tokens=2).choices


def test_a_request_whose_time_is_over_ends_and_frees_what_it_held(small: Mini, door: Doors, slow: None) -> None:
    with door(Service(Pipeline(small), Settings(seconds=0.4, arrival=0.1))) as server:
        with pytest.raises(openai.InternalServerError, match=r"not answered within 0\.4 s") as late:
            server.ask(LONG, max_tokens=400)
        assert late.value.status_code == 504
        with pytest.raises(openai.APIError, match="not answered to its end"):
            server.stream(LONG, max_tokens=400)
        connection = http.client.HTTPConnection(server.netloc)
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        answer = connection.getresponse()
        assert answer.status == 408 and b"did not arrive within 0.1 s" in answer.read()
        connection.close()
        assert server.free()


def test_a_connection_that_does_not_say_what_it_wants_is_closed(small: Mini, door: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first request and before its second; one that is answered is not."""
    monkeypatch.setattr(serving, "HEAD", 0.2)
    with door(Service(Pipeline(small), Settings())) as server:
        host, port = server.netloc.split(":")
        for before in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=30) as line:
                line.sendall(before)
                assert not before or line.recv(4096).startswith(b"HTTP/1.1 200")
                line.sendall(b"POST /v1/chat")
                while line.recv(4096):
                    pass
        assert server.ask(LONG, max_tokens=30).choices


def test_what_nobody_foresaw_is_500_and_counted(small: Mini, door: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an answer and amid a stream; what was held is free."""

    def broken(*_: object) -> bytes:
        raise ZeroDivisionError

    failed = 'mmsdk_requests_total{status="500"}'
    with door(Service(Pipeline(small), Settings())) as server:
        monkeypatch.setattr(Service, "adapter", broken)
        with pytest.raises(openai.InternalServerError, match="its log says what"):
            server.ask("Hi?")
        assert server.comes(failed, 1)
        monkeypatch.undo()
        monkeypatch.setattr(Reply, "chunk", broken)
        with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):
            server.stream("Hi?")
        assert server.comes(failed, 2) and server.metric('mmsdk_requests_total{status="499"}') == 0
        assert server.free()


def test_the_end_waits_for_what_runs_and_lets_nobody_in(small: Mini, door: Doors, slow: None) -> None:
    texts, service = list[str](), Service(Pipeline(small), Settings())
    begun = threading.Event()

    def listen(server: Any) -> None:
        with server.client() as asking:
            for chunk in asking.chat.completions.create(model="small", messages=HI, max_tokens=20, stream=True):
                texts.append(chunk.choices[0].delta.content or "")
                begun.set()

    with ThreadPoolExecutor(1) as pool:
        with door(service) as server:
            listening = pool.submit(listen, server)
            assert begun.wait(60)
        listening.result(30)
    assert "".join(texts) == Pipeline(small)([], "Hi?", max_tokens=20)
    assert service.engine.held == 0 and service.engine.ended.done()
    with pytest.raises(openai.APIConnectionError):
        server.ask("Hi?")


def test_grace_is_not_for_ever(small: Mini, door: Doors, slow: None) -> None:
    service = Service(Pipeline(small), Settings(grace=0, tokens=400))
    with ThreadPoolExecutor(1) as pool:
        with door(service) as server:
            asked = pool.submit(server.ask, LONG, max_tokens=400)
            assert server.comes("mmsdk_open_requests", 1)
        told = asked.exception(10)
        assert isinstance(told, openai.InternalServerError) and told.status_code == 503
        assert told.code == "unavailable" and "the server ended: the request was not answered" in str(told)
    assert service.engine.held == 0 and service.open == 0


def test_who_is_still_asking_when_the_grace_ends_is_told(small: Mini, door: Doors) -> None:
    service = Service(Pipeline(small), Settings(grace=0.2))
    with ExitStack() as stack:
        with door(service) as server:
            host, port = server.netloc.split(":")
            line = stack.enter_context(closing(socket.create_connection((host, int(port)), timeout=30)))
            line.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert server.comes("mmsdk_open_requests", 1)
        answer = b"".join(iter(partial(line.recv, 4096), b""))
    assert answer.startswith(b"HTTP/1.1 503") and b"the server ended: the request did not arrive" in answer
    assert service.engine.held == 0 and service.open == 0


def test_where_the_engine_breaks_everyone_is_told_and_the_server_ends(small: Mini, door: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(engine: Engine) -> list[Event]:
        raise ZeroDivisionError

    monkeypatch.setattr(Engine, "step", broken)

    def serve() -> None:
        told = pytest.raises(openai.InternalServerError, match="the engine has ended")
        with door(Service(Pipeline(small), Settings())) as server, told:
            server.ask("Hi?")

    with pytest.raises(ZeroDivisionError):
        serve()
