"""What `mmsdk serve` does not do: addresses, files, pictures and fields that cannot be, bodies that are too large. Over real sockets."""

import http.client
import io
import json
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import PIL.Image
import pytest
import torch

from mmsdk.apps.beforehand import listening
from mmsdk.apps.serve.refusal import RefusedError
from mmsdk.apps.serve.service import Service
from mmsdk.apps.serve.settings import Settings
from mmsdk.apps.serve.wire import parsed
from mmsdk.compress import compression
from mmsdk.errors import InputError
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline

CLIP = Path(__file__).parents[2] / "apps" / "media" / "motion.mp4"
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
        with pytest.raises(openai.BadRequestError, match="redirects further .*; send the address that it leads to"):
            open_one.ask(shown(f"{pictures}/elsewhere"), "What is it?")
    assert answer.choices[0].message.content == pipe([png(0)], "What is it?", max_tokens=8)
    host, way = pictures.removeprefix("http://"), "send what is there as a data: URI, or start the server with"
    with pytest.raises(openai.BadRequestError, match=f"{host} is not among the hosts .*; {way} --allow-host {host} --allow-network 127"):
        server.ask(shown(f"{pictures}/a.png"), "What is it?")
    for path in (str(CLIP), CLIP.as_uri(), "ftp://example.org/a.png", ""):
        with pytest.raises(openai.BadRequestError, match="a data: URI or an http") as refused:
            server.ask(shown(path), "What is it?")
        assert refused.value.param == "messages[0].content[0]"


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_what_is_advised_about_an_address_lets_it_be_fetched(small: Mini, door: Doors, pictures: str, name: str) -> None:
    """Also where its host is allowed already."""
    address = pictures.replace("127.0.0.1", name) + "/a.png"
    for hosts in ((), ("*", f"{name}:{pictures.rpartition(':')[2]}")):
        with door(Service(Pipeline(small), Settings(hosts=hosts))) as server, pytest.raises(openai.BadRequestError) as refused:
            server.ask(shown(address), "What is it?")
        words = re.findall(r"--allow-(host|network) ([^\s'\"]+)", refused.value.message.partition("; ")[2])
        advised = [tuple(dict.fromkeys(value for kind, value in words if kind == wanted)) for wanted in ("host", "network")]
        with door(Service(Pipeline(small), Settings(hosts=advised[0], networks=advised[1]))) as server:
            assert server.ask(shown(address), "What is it?", max_tokens=1).choices


def test_a_path_that_is_not_there_is_told_those_that_are(server: Any) -> None:
    status, told = server.raw(b"{}", "/v1/completions")
    for route in ("POST /v1/chat/completions", "GET /v1/models,", "GET /v1/models/{name:path}", "GET /health", "GET /metrics"):
        assert route in f"{told['message']},"
    assert status == 404 and told["code"] == "not_found"


@pytest.mark.parametrize(
    ("setting", "value", "param"),
    [
        ("temperature", 2.01, "temperature"),
        ("temperature", 1e9, "temperature"),
        ("top_logprobs", 21, "top_logprobs"),
        ("top_logprobs", -1, "top_logprobs"),
    ],
)
def test_settings_beyond_openais_bounds_are_refused(server: Any, setting: str, value: float, param: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{setting} is .*, expected 0 to") as refused:
        server.ask("What is it?", logprobs=True, max_tokens=1, **{setting: value})
    assert refused.value.param == param
    assert server.ask("What is it?", temperature=2, logprobs=True, top_logprobs=20, max_tokens=1).choices[0].logprobs.content


def test_a_picture_with_fewer_tokens_than_the_servers_count_keeps_all(small: Mini, door: Doors) -> None:
    """The count is the operator's; who asks cannot know how many tokens a picture has."""
    whole = Pipeline(small)([png(0)], "What is it?", max_tokens=4)
    with door(Service(Pipeline(small, compression("uniform:250")), Settings())) as server:
        answer = server.ask(png(0), "What is it?", max_tokens=4)
    told = answer.usage.model_dump()
    assert answer.choices[0].message.content == whole and whole.tokens.visual < 250
    assert told["visual_tokens_kept"] == told["visual_tokens"] == whole.tokens.visual


def test_in_10_what_is_wrong_with_a_picture_is_told_with_its_place(server: Any) -> None:
    """Also IN-14: pixels are counted before they are decoded, over all pictures of a request."""
    with pytest.raises(openai.BadRequestError, match=r"content\[0\]: data URI: its base64 is damaged: "):
        server.ask(shown("data:image/png;base64,####"), "Which?")
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
        # none of them would be taken: they are counted before they are looked at
        ({"messages": [{}] * 9000}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{}] * 4100}] * 2}, 400, "messages"),
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


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tempreature": 1}, "tempreature: there is no such field; did you mean 'temperature'?"),
        ({"xyzzy": 1}, "xyzzy: there is no such field; leave it out"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage: there is no such field; leave it out"),
        ({"messages": []}, "messages: it is empty; at least one is expected"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: it is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: it is 5, expected a string or a list"),
        ({"messages": said(5)}, "messages[0].content[0]: it is 5, expected an object"),
        (
            {"messages": said({"type": "input_audio"})},
            "messages[0].content[0]: nothing of the type 'input_audio' is taken here; there are 'text', 'image_url', 'video_url'",
        ),
        ({"messages": said({})}, "messages[0].content[0]: it does not say of which type it is; there are 'text', 'image_url', 'video_url'"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role: it is 'tool', expected 'system', 'developer', 'user' or 'assistant'",
        ),
        ({"model": 5}, "model: it is 5, expected a string"),
        ({"temperature": "hot"}, "temperature: it is 'hot', expected a number"),
        ({"max_tokens": 2.5}, "max_tokens: it is 2.5, expected a whole number"),
        ({"stream": "yes"}, "stream: it is 'yes', expected true or false"),
        ({"stop": 5}, "stop: it is 5, expected a string or a list"),
        ({"stop": [5]}, "stop[0]: it is 5, expected a string"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls: it is not supported; leave it out"),
        ({"response_format": "json"}, "response_format: it is 'json', expected an object"),
        ({"metadata": {"a": 1}}, "metadata.a: it is 1, expected a string"),
    ],
)
def test_what_is_wrong_with_a_field_is_told_in_plain_words(change: dict[str, Any], told: str) -> None:
    with pytest.raises(RefusedError) as refused:
        parsed(json.dumps(GOOD | change).encode())
    assert str(refused.value) == told


def test_what_asks_for_nothing_is_taken(server: Any) -> None:
    """Fields that hold nothing, as clients send them."""
    nothing: dict[str, Any] = {"n": 1, "tools": None, "tool_choice": "auto", "stream": None, "user": "me", "stop": None, "logprobs": False}
    assert server.raw(json.dumps(GOOD | nothing | {"response_format": {"type": "text"}}).encode())[0] == 200


SAID = json.dumps(GOOD).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"null",
        b'{"model": "\\ud800"}',
        b"\xef\xbb\xbf" + SAID,
        SAID.replace(b"Hi?", b"\xff"),
        SAID[:-1],
    ]
    + [SAID.replace(b'"max_tokens": 2', b'"max_tokens": ' + number) for number in (b"9" * 5000, b"1e400", b"NaN")]
    + [SAID[:-1] + b', "guided_json": ' + b'{"properties": {"a": ' * depth + b"{}" + b"}}" * (depth + 1) for depth in (99, 5000)],
    ids=lambda body: f"{len(body)} bytes",
)
def test_a_body_that_is_no_json_is_400(server: Any, body: bytes) -> None:
    """No Unicode, no end, numbers without one, and depths that no request has."""
    status, error = server.raw(body)
    assert status == 400 and error["message"] and len(error["message"]) < 300


def test_what_was_sent_comes_back_in_part(server: Any) -> None:
    """However long a name is, the message about it is not."""
    for change, param in (({"model": "m" * 100_000}, "model"), ({"f" * 100_000: 1}, "f" * 200)):
        _, error = server.raw(json.dumps(GOOD | change).encode())
        assert error["param"] == param and len(error["message"]) <= 2000


def test_cs_13_a_large_body_is_413_told_or_not_how_long_it_is(server: Any) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        server.ask("x" * 200_000)
    assert refused.value.status_code == 413 and refused.value.code == "body_too_large"
    connection = http.client.HTTPConnection(server.netloc, timeout=60)
    pieces, headers = (b"x" * 1000 for _ in range(300)), {"Transfer-Encoding": "chunked"}
    connection.request("POST", "/v1/chat/completions", pieces, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_settings_and_doors_that_cannot_be(small: Mini, door: Doors) -> None:
    for wrong in ({"rows": 0}, {"seconds": 0.0}, {"arrival": 0}, {"forming": -1}, {"keys": ("a b",)}, {"networks": ("nowhere",)}):
        with pytest.raises(InputError):
            Settings(**wrong)  # type: ignore[arg-type]  # one of them each time
    with door(Service(Pipeline(small), Settings())) as server, pytest.raises(InputError, match="cannot listen there"):
        listening("127.0.0.1", int(server.netloc.split(":")[1]))
    with pytest.raises(InputError, match="70000 is no port"):
        listening("127.0.0.1", 70_000)
