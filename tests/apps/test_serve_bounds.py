"""What `mmsdk serve` does not do, and for whom: bounds, strangers, tenants, clients that leave, and its end. Over real sockets."""

import http.client
import io
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import openai
import PIL.Image
import pytest
import torch

from mmsdk.apps.serve import completion
from mmsdk.apps.serve import server as serving
from mmsdk.apps.serve.form import form_of
from mmsdk.apps.serve.reply import Reply
from mmsdk.apps.serve.service import Service
from mmsdk.apps.serve.settings import Settings
from mmsdk.compress import compression
from mmsdk.errors import InputError
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.serve.engine import Engine, Event

CLIP = Path(__file__).parents[2] / "apps" / "media" / "motion.mp4"
LONG = "Say on and on."  # the small model never ends by itself
Doors = Callable[[Service], AbstractContextManager[Any]]


def png(seed: int, size: int = 56) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size, size, 3), dtype=torch.uint8, generator=generator)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels.numpy()).save(file, "PNG")
    return file.getvalue()


def shown(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def said(*content: Any) -> list[Any]:
    return [{"role": "user", "content": list(content)}]


@pytest.fixture(scope="module")
def server(small: Mini, door: Doors) -> Iterator[Any]:
    settings = Settings(rows=4, body=200_000, media=3, pixels=100_000, tokens=300, seconds=60)
    with door(Service(Pipeline(small, compression("uniform:8")), settings)) as opened:
        yield opened


@pytest.fixture
def pictures() -> Iterator[str]:
    """A host that has a picture, and one page that leads elsewhere."""

    class Host(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/a.png"
            self.send_response(200 if found else 302)
            for name, value in (("Content-Length", str(len(png(0)))),) if found else (("Location", "http://169.254.169.254/"),):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(png(0) if found else b"")

        def log_message(self, *args: object) -> None:
            pass

    host = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    thread = threading.Thread(target=lambda: host.serve_forever(0.05))
    thread.start()
    yield f"http://127.0.0.1:{host.server_port}"
    host.shutdown()
    thread.join()
    host.server_close()


def test_cs_13_addresses_are_fetched_from_allowed_hosts_alone(small: Mini, server: Any, door: Doors, pictures: str) -> None:
    """Also IN-16: no redirect leads out of them. Files of the server's machine are never read."""
    allowed, pipe = (
        Settings(hosts=(pictures.removeprefix("http://"),), networks=("127.0.0.0/8",)),
        Pipeline(small, compression("uniform:8")),
    )
    with door(Service(pipe, allowed)) as open_one:
        answer = open_one.ask(shown(f"{pictures}/a.png"), "What is it?", max_tokens=8)
        with pytest.raises(openai.BadRequestError, match="redirects further"):
            open_one.ask(shown(f"{pictures}/elsewhere"), "What is it?")
    assert answer.choices[0].message.content == pipe([png(0)], "What is it?", max_tokens=8)
    with pytest.raises(openai.BadRequestError, match="not among the hosts"):
        server.ask(shown(f"{pictures}/a.png"), "What is it?")
    for path in (str(CLIP), CLIP.as_uri(), "ftp://example.org/a.png", ""):
        with pytest.raises(openai.BadRequestError, match="a data: URI or an http") as refused:
            server.ask(shown(path), "What is it?")
        assert refused.value.param == "messages[0].content[0]"


def test_in_10_what_is_wrong_with_a_picture_is_told_with_its_place(server: Any) -> None:
    """Also IN-14: pixels are counted before they are decoded, over all pictures of a request."""
    for broken in (server.uri(bytes(range(256)) * 4), "data:image/png;base64,####", server.uri(png(0)[:200])):
        with pytest.raises(openai.BadRequestError) as refused:
            server.ask(png(0), shown(broken), png(1), "Which?")
        assert refused.value.param == "messages[0].content[1]" and refused.value.code == "invalid_media"
    flat, vast = io.BytesIO(), bytearray(png(0))
    PIL.Image.new("L", (300, 300)).save(flat, "PNG")
    # its head says so, and nothing behind it is looked at
    vast[16:24] = (60_000).to_bytes(4, "big") * 2
    vast[29:33] = zlib.crc32(vast[12:29]).to_bytes(4, "big")
    assert server.ask(flat.getvalue(), "What?", max_tokens=1).choices
    for shows, told in (([flat.getvalue()] * 2, "Limits.pixels"), ([png(0)] * 4, "at most 3 go into"), ([bytes(vast)], "60,?000")):
        with pytest.raises(openai.BadRequestError, match=told):
            server.ask(*shows, "What?")


GOOD: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Hi?"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "gpt"}, 404, "model"),
        ({"model": 5}, 400, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ({"messages": said({"type": "text"})}, 400, "messages[0].content[0].text"),
        ({"messages": said({"type": "image_url", "image_url": {"link": "x"}})}, 400, "messages[0].content[0].image_url.url"),
        ({"messages": said({"type": "input_audio"})}, 400, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": " "}]}, 400, "messages[0].content"),
        ({"messages": [*GOOD["messages"], {"role": "assistant", "content": "Hi."}]}, 400, "messages[1].role"),
        ({"messages": [{"role": "system", "content": [shown("data:,x")]}, *GOOD["messages"]]}, 400, "messages[0].content[0]"),
        ({"messages": GOOD["messages"] * 600}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 70_000}]}, 400, "messages"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"seed": -1}, 400, "seed"),
        ({"stop": [""]}, 400, "stop"),
        ({"stop": ["a"] * 17}, 400, "stop"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_completion_tokens": 301}, 400, "max_completion_tokens"),
        ({"max_tokens": 300, "messages": [{"role": "user", "content": "word " * 300}]}, 400, "messages"),
        ({"messages": said(*[shown(f"data:image/png;base64,{'A' * 8}")] * 4, {"type": "text", "text": "x"})}, 400, "messages"),
        ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
        ({"n": 5}, 400, "n"),
        ({"n": 10**12, "guided_choice": ["a"]}, 400, "n"),
        ({"n": 2, "seed": 2**63 - 1}, 400, "seed"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"functions": [{"name": "f"}]}, 400, "functions"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"presence_penalty": 2.5}, 400, "presence_penalty"),
        ({"frequency_penalty": "high"}, 400, "frequency_penalty"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"tempreature": 1}, 400, "tempreature"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_with_a_request_is_told_by_name(server: Any, change: dict[str, Any], status: int, param: str) -> None:
    told, error = server.raw(json.dumps(GOOD | change).encode())
    assert (told, error["param"]) == (status, param), error
    assert error["type"] == "invalid_request_error" and error["code"] and error["message"]


def test_what_asks_for_nothing_is_taken(server: Any) -> None:
    """Fields that hold nothing, as clients send them."""
    nothing: dict[str, Any] = {"n": 1, "tools": None, "tool_choice": "auto", "stream": None, "user": "me", "stop": None, "logprobs": False}
    assert server.raw(json.dumps(GOOD | nothing | {"response_format": {"type": "text"}}).encode())[0] == 200


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b'{"model": "\\ud800"}'])
def test_a_body_that_is_no_json_is_400(server: Any, body: bytes) -> None:
    assert server.raw(body)[0] == 400


def test_cs_13_a_large_body_is_413_told_or_not_how_long_it_is(server: Any) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        server.ask("x" * 200_000)
    assert refused.value.status_code == 413 and refused.value.code == "body_too_large"
    connection = http.client.HTTPConnection(server.netloc, timeout=60)
    pieces, headers = (b"x" * 1000 for _ in range(300)), {"Transfer-Encoding": "chunked"}
    connection.request("POST", "/v1/chat/completions", pieces, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_keys_are_wanted_and_those_of_one_share_nothing_with_another(small: Mini, door: Doors) -> None:
    """CS-07: a prompt that one tenant has asked is found again by nobody else."""
    words = "Is there anything that can be told of it, and if so, what would that be? " * 3
    with door(Service(Pipeline(small), Settings(keys=("one", "two")))) as server:
        for key in ("three", "on", "one two"):
            with pytest.raises(openai.AuthenticationError), server.client(key) as asking:
                asking.models.list()
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
    with door(Service(Pipeline(small), Settings(keys=("one", "two"), forming=2))) as server, ThreadPoolExecutor(6) as pool:
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
        with asking.chat.completions.create(model="small", messages=said({"type": "text", "text": LONG}), stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError):
                server.ask("Hi?", key="one")
            waits = server.client("two")
            with pytest.raises(openai.APITimeoutError), waits:
                waits.with_options(timeout=0.2).chat.completions.create(model="small", messages=GOOD["messages"])
        assert server.ask("Hi?", key="two", max_tokens=1).choices


@pytest.mark.parametrize("stream", [False, True])
def test_cs_11_a_client_that_leaves_frees_what_it_held(small: Mini, door: Doors, slow: None, stream: bool) -> None:
    with door(Service(Pipeline(small), Settings(rows=1, tokens=400))) as server, ExitStack() as stack:
        gone, waits = (stack.enter_context(closing(http.client.HTTPConnection(server.netloc))) for _ in range(2))
        content = said(shown(server.uri(png(0))), {"type": "text", "text": LONG})
        body = json.dumps(GOOD | {"messages": content, "max_tokens": 400, "stream": stream})
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
        with asking.chat.completions.create(model="small", messages=GOOD["messages"], max_tokens=200, stream=True) as stream:
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
            for chunk in asking.chat.completions.create(model="small", messages=GOOD["messages"], max_tokens=20, stream=True):
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
        assert isinstance(asked.exception(10), openai.APIError)
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


def test_settings_and_doors_that_cannot_be(small: Mini, door: Doors) -> None:
    for wrong in ({"rows": 0}, {"seconds": 0.0}, {"arrival": 0}, {"forming": -1}, {"keys": ("a b",)}, {"networks": ("nowhere",)}):
        with pytest.raises(InputError):
            Settings(**wrong)  # type: ignore[arg-type]  # one of them each time
    with door(Service(Pipeline(small), Settings())) as server, pytest.raises(InputError, match="cannot listen there"):
        serving.listening("127.0.0.1", int(server.netloc.split(":")[1]))
    with pytest.raises(InputError, match="70000 is no port"):
        serving.listening("127.0.0.1", 70_000)
