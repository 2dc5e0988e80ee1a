"""`mmsdk serve` over real sockets, asked by OpenAI's own client; the truth is what the pipeline answers to the same question."""

import base64
import http.client
import io
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import PIL.Image
import pytest
import torch
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mmsdk.answer import Answer
from mmsdk.apps.bench.server import Asking, measured
from mmsdk.apps.serve.server import listening, serving
from mmsdk.apps.serve.service import Service
from mmsdk.apps.serve.settings import Settings
from mmsdk.compress import compression
from mmsdk.errors import InputError
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.serve.engine import Engine, Event
from mmsdk.vision.intake import load_video

CLIP = Path(__file__).parents[2] / "apps" / "media" / "motion.mp4"
LONG = "Say on and on."  # the small model never ends by itself


def png(seed: int, size: int = 56) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size, size, 3), dtype=torch.uint8, generator=generator)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels.numpy()).save(file, "PNG")
    return file.getvalue()


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def shown(*urls: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def said(*parts: str | dict[str, Any]) -> list[Any]:
    """One message of a user's."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def client(url: str, key: str = "none", **headers: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60, default_headers=headers)


def ask(url: str, *parts: str | dict[str, Any], **settings: Any) -> ChatCompletion:
    with client(url) as asked:
        answer: ChatCompletion = asked.chat.completions.create(model="small", messages=said(*parts), **settings)
    return answer


def raw(url: str, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    told = json.loads(answer.read())
    connection.close()
    return answer.status, told.get("error", told)


def metric(url: str, line: str) -> float:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return next((float(one.rpartition(" ")[2]) for one in lines if one.startswith(f"{line} ")), 0.0)


def comes(url: str, line: str, value: float) -> bool:
    """Whether a metric has this value within some seconds."""
    until = time.monotonic() + 60
    while metric(url, line) != value:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(scope="module")
def url(small: Mini) -> Iterator[str]:
    settings = Settings(rows=4, body=200_000, media=3, pixels=100_000, tokens=300, seconds=60)
    with serving(Service(Pipeline(small, compression("uniform:8")), settings)) as address:
        yield address


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes long enough that something can happen between two of them."""
    original = Engine.step

    def waiting(engine: Engine) -> list[Event]:
        time.sleep(0.05)
        return original(engine)

    monkeypatch.setattr(Engine, "step", waiting)


def answers(small: Mini, asked: Sequence[tuple[list[bytes], str, dict[str, Any]]]) -> list[Answer]:
    pipe = Pipeline(small, compression("uniform:8"))
    return [pipe(media, words, **settings) for media, words, settings in asked]


def test_answers_and_counts_are_the_pipelines_whole_and_as_a_stream(small: Mini, url: str) -> None:
    """Text, a picture and two; greedy and drawn; all at one time. PB-13, PB-14."""
    asked = [
        ([png(0), png(1)][: n % 3], f"Question {n}: what is it?", {"max_tokens": 4 + 3 * n, "temperature": 0.8 * (n % 2), "seed": n})
        for n in range(6)
    ]
    wanted = answers(small, asked)

    def whole(number: int) -> ChatCompletion:
        media, words, settings = asked[number]
        return ask(url, *shown(*map(uri, media)), words, **settings)

    def pieces(number: int) -> list[ChatCompletionChunk]:
        media, words, settings = asked[number]
        with client(url) as asking:
            messages = said(*shown(*map(uri, media)), words)
            options: Any = {"include_usage": True}
            return list(asking.chat.completions.create(model="small", messages=messages, stream=True, stream_options=options, **settings))

    with ThreadPoolExecutor(12) as pool:
        completions, streams = pool.map(whole, range(6)), pool.map(pieces, range(6))
    for completion, stream, answer in zip(completions, streams, wanted, strict=True):
        assert completion.choices[0].message.content == answer and completion.choices[0].finish_reason == answer.finish
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream[:-1]) == answer
        assert stream[0].choices[0].delta.role == "assistant" and stream[-2].choices[0].finish_reason == answer.finish
        for usage in (completion.usage, stream[-1].usage):
            assert usage is not None and usage.model_extra is not None
            assert (usage.prompt_tokens, usage.completion_tokens) == (answer.tokens.prompt, answer.tokens.generated)
            extra = usage.model_extra
            assert (extra["visual_tokens"], extra["visual_tokens_kept"]) == (answer.tokens.visual, answer.tokens.kept)
    assert comes(url, "mmsdk_held_blocks", 0)


def test_several_answers_come_whole_and_as_a_stream_with_their_penalties(small: Mini, url: str) -> None:
    """Each with a seed of its own; the prompt is counted once, and every one takes the place of a request."""
    settings: dict[str, Any] = {"max_tokens": 7, "temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    extra, media = {"repetition_penalty": 0.3}, [png(0)]
    asked = [(media, "What is it?", settings | extra | {"seed": 5 + place}) for place in range(3)]
    wanted = answers(small, asked)
    messages, seen = said(*shown(uri(png(0))), "What is it?"), dict[int, str]()
    with client(url) as asking:
        whole = asking.chat.completions.create(model="small", messages=messages, n=3, seed=5, extra_body=extra, **settings)
        options: Any = {"include_usage": True}
        stream = list(
            asking.chat.completions.create(
                model="small", messages=messages, n=3, seed=5, extra_body=extra, stream=True, stream_options=options, **settings
            )
        )
    assert [choice.message.content for choice in whole.choices] == wanted and [choice.index for choice in whole.choices] == [0, 1, 2]
    for chunk in stream[:-1]:
        (choice,) = chunk.choices
        seen[choice.index] = seen.get(choice.index, "") + (choice.delta.content or "")
    assert [seen[place] for place in range(3)] == wanted
    roles, ends = (
        [chunk.choices[0].index for chunk in stream[:-1] if getattr(chunk.choices[0], name)] for name in ("delta", "finish_reason")
    )
    assert sorted(ends) == [0, 1, 2] and len(roles) > 3
    for usage in (whole.usage, stream[-1].usage):
        assert usage is not None and usage.prompt_tokens == wanted[0].tokens.prompt
        assert usage.completion_tokens == sum(answer.tokens.generated for answer in wanted)
    assert comes(url, "mmsdk_held_blocks", 0) and comes(url, "mmsdk_open_requests", 0)


def test_logprobs_are_told_as_openai_tells_them(small: Mini, url: str) -> None:
    answer = Pipeline(small, compression("uniform:8"))([], LONG, max_tokens=6, logprobs=3)
    spelled = [small.tokenizer.decode([one.id]) for one in answer.logprobs]
    whole = ask(url, LONG, max_tokens=6, logprobs=True, top_logprobs=3).choices[0].logprobs
    with client(url) as asking:
        chunks = list(asking.chat.completions.create(model="small", messages=said(LONG), max_tokens=6, logprobs=True, stream=True))
    streamed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content or []]
    assert whole is not None and whole.content is not None
    for found in (whole.content, streamed):
        assert [one.token for one in found] == spelled and all(bytes(one.bytes or []).decode() == one.token for one in found)
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in answer.logprobs], abs=1e-4)
    tops = [[small.tokenizer.decode([other.id]) for other in one.top] for one in answer.logprobs]
    assert [[other.token for other in one.top_logprobs] for one in whole.content] == tops
    assert all(one.top_logprobs == [] for one in streamed)
    assert ask(url, LONG, max_tokens=1).choices[0].logprobs is None


def test_answers_for_which_there_is_no_room_are_429(small: Mini) -> None:
    with serving(Service(Pipeline(small), Settings(rows=2, waiting=0))) as address:
        assert len(ask(address, "Hi?", n=2, max_tokens=1).choices) == 2
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(ask, address, LONG, max_tokens=300)
            assert comes(address, "mmsdk_open_requests", 1)
            with pytest.raises(openai.RateLimitError):
                ask(address, "Hi?", n=2, max_tokens=1)
            long.result(60)
        assert comes(address, "mmsdk_open_requests", 0)


def test_pb_12_stop_strings_end_a_stream_where_they_end_the_whole(small: Mini, url: str) -> None:
    ((answer,),) = (answers(small, [([], LONG, {"max_tokens": 30})]),)
    stop = [answer[8:11], answer[5:7]]
    whole = ask(url, LONG, max_tokens=30, stop=stop).choices[0]
    with client(url) as asking:
        chunks = list(asking.chat.completions.create(model="small", messages=said(LONG), max_tokens=30, stop=stop, stream=True))
    assert whole.message.content == answer[: min(answer.index(one) for one in stop)] and whole.finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_a_conversation_is_read_in_turns_and_another_history_is_another_prompt(small: Mini, url: str) -> None:
    """CS-08, and PB-04: what looks like a marker is text."""
    history: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Which colour?"},
        {"role": "assistant", "content": "Red.<|im_end|>", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "Sure?"},
    ]
    read = "Be brief.\nQuestion: Which colour?\nAnswer: Red.<|im_end|>\nQuestion: Sure?\nAnswer:"
    with client(url) as asking:
        one = asking.chat.completions.create(model="small", messages=history, max_tokens=12)
        other = asking.chat.completions.create(model="small", messages=history[3:], max_tokens=12)
    assert one.usage is not None and one.usage.prompt_tokens == 1 + len(small.tokenizer.encode(read))
    assert one.choices[0].message.content != other.choices[0].message.content == answers(small, [([], "Sure?", {"max_tokens": 12})])[0]


def test_a_clip_is_seen_as_the_pipeline_sees_it(small: Mini) -> None:
    pipe = Pipeline(small, compression("uniform:8"))
    with serving(Service(pipe, Settings(frames=4), "small")) as address:
        part = {"type": "video_url", "video_url": {"url": uri(CLIP.read_bytes(), "video/mp4")}}
        answer = ask(address, part, "What happens?", max_tokens=8)
    wanted = pipe(load_video(CLIP, sampling=Settings(frames=4).sampling), "What happens?", max_tokens=8)
    assert answer.choices[0].message.content == wanted and wanted.tokens.kept == 8 < wanted.tokens.visual


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
    thread = threading.Thread(target=host.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{host.server_port}"
    host.shutdown()
    thread.join()
    host.server_close()


def test_cs_13_addresses_are_fetched_from_allowed_hosts_alone(small: Mini, url: str, pictures: str) -> None:
    """Also IN-16: no redirect leads out of them. Files of the server's machine are never read."""
    allowed = Settings(hosts=(pictures.removeprefix("http://"),), networks=("127.0.0.0/8",))
    with serving(Service(Pipeline(small, compression("uniform:8")), allowed)) as address:
        answer = ask(address, *shown(f"{pictures}/a.png"), "What is it?", max_tokens=8)
        with pytest.raises(openai.BadRequestError, match="redirects further"):
            ask(address, *shown(f"{pictures}/elsewhere"), "What is it?")
    assert answer.choices[0].message.content == answers(small, [([png(0)], "What is it?", {"max_tokens": 8})])[0]
    with pytest.raises(openai.BadRequestError, match="not among the hosts"):
        ask(url, *shown(f"{pictures}/a.png"), "What is it?")
    for path in (str(CLIP), CLIP.as_uri(), "ftp://example.org/a.png", ""):
        with pytest.raises(openai.BadRequestError, match="a data: URI or an http") as refused:
            ask(url, *shown(path), "What is it?")
        assert refused.value.param == "messages[0].content[0]"


def test_in_10_what_is_wrong_with_a_picture_is_told_with_its_place(url: str) -> None:
    """Also IN-14: pixels are counted before they are decoded, over all pictures of a request."""
    with pytest.raises(openai.BadRequestError) as refused:
        ask(url, *shown(uri(png(0)), uri(bytes(range(256)) * 4), uri(png(1))), "Which?")
    assert refused.value.param == "messages[0].content[1]" and refused.value.code == "invalid_media"
    flat = io.BytesIO()
    PIL.Image.new("L", (300, 300)).save(flat, "PNG")
    assert ask(url, *shown(uri(flat.getvalue())), "What?", max_tokens=1).choices
    for urls, told in (([uri(flat.getvalue())] * 2, "Limits.pixels"), ([uri(png(0))] * 4, "at most 3 go into a request")):
        with pytest.raises(openai.BadRequestError, match=told):
            ask(url, *shown(*urls), "What?")


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
        ({"messages": [{"role": "system", "content": shown("data:,x")}, *GOOD["messages"]]}, 400, "messages[0].content[0]"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"seed": -1}, 400, "seed"),
        ({"stop": [""]}, 400, "stop"),
        ({"stop": ["a"] * 17}, 400, "stop"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_completion_tokens": 301}, 400, "max_completion_tokens"),
        ({"max_tokens": 300, "messages": [{"role": "user", "content": "word " * 300}]}, 400, "messages"),
        ({"messages": said(*shown(*[uri(png(0))] * 3), "word " * 490)}, 400, "messages"),
        ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
        ({"n": 5}, 400, "n"),
        ({"n": 2, "seed": 2**63 - 1}, 400, "seed"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
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
def test_what_is_wrong_with_a_request_is_told_by_name(url: str, change: dict[str, Any], status: int, param: str) -> None:
    told, error = raw(url, json.dumps(GOOD | change).encode())
    assert (told, error["param"]) == (status, param), error
    assert error["type"] == "invalid_request_error" and error["code"] and error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b'{"model": "\\ud800"}'])
def test_a_body_that_is_no_json_is_400_and_others_are_answered(url: str, body: bytes) -> None:
    assert raw(url, body)[0] == 400
    assert raw(url, json.dumps(GOOD | {"n": 1, "tools": None, "user": "me", "response_format": {"type": "text"}}).encode())[0] == 200


def test_cs_13_a_large_body_is_413_told_or_not_how_long_it_is(url: str) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        ask(url, "x" * 200_000)
    assert refused.value.status_code == 413 and refused.value.code == "body_too_large"
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    pieces, headers = (b"x" * 1000 for _ in range(300)), {"Transfer-Encoding": "chunked"}
    connection.request("POST", "/v1/chat/completions", pieces, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_models_health_and_paths_that_are_none(url: str) -> None:
    with client(url) as asking:
        assert [model.id for model in asking.models.list()] == ["small"] and asking.models.retrieve("small").owned_by == "mmsdk"
        with pytest.raises(openai.NotFoundError):
            asking.models.retrieve("org/other")
        with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
            asking.embeddings.create(model="small", input="x")
    assert raw(url, b"", "/v1/models")[0] == 405
    assert ask(url, "Hi?", max_tokens=1).object == "chat.completion"
    assert raw(url, b"{}", Origin="https://evil.example")[0] == 403
    assert metric(url, 'mmsdk_requests_total{status="200"}') > 0 and metric(url, "process_resident_memory_bytes") > 0


def test_keys_are_wanted_and_those_of_one_share_nothing_with_another(small: Mini) -> None:
    """CS-07: a prompt that one tenant has asked is found again by nobody else."""
    words = "Is there anything that can be told of it, and if so, what would that be? " * 3
    with serving(Service(Pipeline(small), Settings(keys=("one", "two")))) as address:
        for key in ("three", "on"):
            with pytest.raises(openai.AuthenticationError), client(address, key) as asking:
                asking.models.list()
        cached = []
        for key in ("one", "one", "two"):
            with client(address, key) as asking:
                usage = asking.chat.completions.create(model="small", messages=said(words), max_tokens=1).usage
            assert usage is not None and usage.prompt_tokens_details is not None
            cached.append(usage.prompt_tokens_details.cached_tokens)
        connection = http.client.HTTPConnection(urlsplit(address).netloc)
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read()) == {"status": "ok", "open_requests": 0}
        connection.close()
    assert cached[0] == cached[2] == 0 < (cached[1] or 0)


@pytest.mark.parametrize("stream", [False, True])
def test_cs_11_a_client_that_leaves_frees_what_it_held(small: Mini, slow: None, stream: bool) -> None:
    with serving(Service(Pipeline(small), Settings(rows=1, tokens=400))) as address, ExitStack() as stack:
        gone, waits = (stack.enter_context(closing(http.client.HTTPConnection(urlsplit(address).netloc))) for _ in range(2))
        body = json.dumps(GOOD | {"messages": said(*shown(uri(png(0))), LONG), "max_tokens": 400, "stream": stream})
        for connection in (gone, waits):
            connection.request("POST", "/v1/chat/completions", body)
        until = time.monotonic() + 60
        while metric(address, "mmsdk_held_blocks") == 0 and time.monotonic() < until:
            time.sleep(0.01)
        if stream:
            assert gone.getresponse().readline().startswith(b"data: ")
        assert metric(address, "mmsdk_held_blocks") > 0 and comes(address, "mmsdk_open_requests", 2)
        waits.close()
        assert comes(address, 'mmsdk_requests_total{status="499"}', 1)
        gone.close()
        assert comes(address, "mmsdk_held_blocks", 0) and comes(address, "mmsdk_open_requests", 0)
        assert metric(address, 'mmsdk_requests_total{status="499"}') == 2 and metric(address, 'mmsdk_requests_total{status="200"}') == 0
        assert ask(address, "Hi?", max_tokens=2).usage


def test_who_finds_no_room_is_told_to_come_back(small: Mini, slow: None) -> None:
    with serving(Service(Pipeline(small), Settings(rows=1, waiting=0))) as address, client(address) as asking:
        with asking.chat.completions.create(model="small", messages=said(LONG), max_tokens=200, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as refused:
                ask(address, "Hi?")
        assert refused.value.response.headers["retry-after"] == "1"
        assert comes(address, "mmsdk_open_requests", 0) and ask(address, "Hi?", max_tokens=2).choices


def test_a_request_whose_time_is_over_ends_and_frees_what_it_held(small: Mini, slow: None) -> None:
    with serving(Service(Pipeline(small), Settings(seconds=0.4))) as address:
        with pytest.raises(openai.InternalServerError, match=r"not answered within 0\.4 s") as late:
            ask(address, LONG, max_tokens=400)
        assert late.value.status_code == 504
        with client(address) as asking, pytest.raises(openai.APIError, match="not answered to its end"):
            list(asking.chat.completions.create(model="small", messages=said(LONG), max_tokens=400, stream=True))
        connection = http.client.HTTPConnection(urlsplit(address).netloc)
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        assert connection.getresponse().status == 408
        connection.close()
        assert comes(address, "mmsdk_held_blocks", 0) and comes(address, "mmsdk_open_requests", 0)


def test_the_end_waits_for_what_runs_and_lets_nobody_in(small: Mini, slow: None) -> None:
    texts, service = list[str](), Service(Pipeline(small), Settings())
    begun = threading.Event()

    def listen(address: str) -> None:
        with client(address) as asking:
            for chunk in asking.chat.completions.create(model="small", messages=said(LONG), max_tokens=50, stream=True):
                texts.append(chunk.choices[0].delta.content or "")
                begun.set()

    with ThreadPoolExecutor(1) as pool:
        with serving(service) as address:
            listening = pool.submit(listen, address)
            assert begun.wait(60)
        listening.result(30)
    assert "".join(texts) == Pipeline(small)([], LONG, max_tokens=50)
    assert service.engine.held == 0 and service.engine.ended.done()
    with pytest.raises(openai.APIConnectionError):
        ask(address, "Hi?")


def test_grace_is_not_for_ever(small: Mini, slow: None) -> None:
    service = Service(Pipeline(small), Settings(grace=0, tokens=400))
    with ThreadPoolExecutor(1) as pool:
        with serving(service) as address:
            asked = pool.submit(ask, address, LONG, max_tokens=400)
            assert comes(address, "mmsdk_open_requests", 1)
        assert isinstance(asked.exception(10), openai.APIError)
    assert service.engine.held == 0 and service.open == 0


def test_where_the_engine_breaks_everyone_is_told_and_the_server_ends(small: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(engine: Engine) -> list[Event]:
        raise ZeroDivisionError

    monkeypatch.setattr(Engine, "step", broken)

    def serve() -> None:
        told = pytest.raises(openai.InternalServerError, match="the engine has ended")
        with serving(Service(Pipeline(small), Settings())) as address, told:
            ask(address, "Hi?")

    with pytest.raises(ZeroDivisionError):
        serve()


def test_settings_and_doors_that_cannot_be(small: Mini) -> None:
    for wrong in ({"rows": 0}, {"seconds": 0.0}, {"keys": ("a b",)}, {"networks": ("nowhere",)}):
        with pytest.raises(InputError):
            Settings(**wrong)  # type: ignore[arg-type]  # one of them each time
    with serving(Service(Pipeline(small), Settings())) as address, pytest.raises(InputError, match="cannot listen there"):
        listening("127.0.0.1", urlsplit(address).port or 0)
    with pytest.raises(InputError, match="70000 is no port"):
        listening("127.0.0.1", 70_000)


def test_a_load_loses_nothing_and_leaves_nothing(small: Mini) -> None:
    asking = Asking(requests=30, concurrency=8, cancelled=4, malformed=6, tokens=12)
    with serving(Service(Pipeline(small, compression("uniform:8")), Settings(rows=4))) as address:
        row = measured(address, "small", asking)
        assert metric(address, 'mmsdk_requests_total{status="400"}') == 6
    assert [row[key] for key in ("requests", "concurrency", "cancelled", "malformed", "lost", "leaked_blocks")] == [30, 8, 4, 6, 0, 0]
    assert isinstance(row["p95_ttft_ms"], float) and row["p95_ttft_ms"] > 0 and isinstance(row["rss_growth_mb"], float)
    assert [asking.kinds.count(kind) for kind in ("answered", "cancelled", "malformed")] == [20, 4, 6]
