"""`mmsdk serve` over real sockets, asked by OpenAI's own client: answers, which are what the pipeline answers to the same question."""

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import PIL.Image
import pytest
import torch

from mmsdk.answer import Answer
from mmsdk.apps.bench.server import Asking, measured
from mmsdk.apps.serve.service import Service
from mmsdk.apps.serve.settings import Settings
from mmsdk.compress import compression
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.recall import recalling
from mmsdk.vision.intake import load_video

CLIP = Path(__file__).parents[2] / "apps" / "media" / "motion.mp4"
LONG = "Say on and on."  # the small model never ends by itself
USAGE: Any = {"include_usage": True}
Doors = Callable[[Service], AbstractContextManager[Any]]


def png(seed: int, size: int = 56) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size, size, 3), dtype=torch.uint8, generator=generator)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels.numpy()).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def server(small: Mini, door: Doors) -> Iterator[Any]:
    with door(Service(Pipeline(small, compression("uniform:8")), Settings(rows=4, tokens=300, seconds=60))) as opened:
        yield opened


def answers(small: Mini, asked: Sequence[tuple[list[bytes], str, dict[str, Any]]]) -> list[Answer]:
    pipe = Pipeline(small, compression("uniform:8"))
    return [pipe(media, words, **settings) for media, words, settings in asked]


def test_answers_and_counts_are_the_pipelines_whole_and_as_a_stream(small: Mini, server: Any) -> None:
    """Text, a picture and two; greedy and drawn; all at one time. PB-13, PB-14."""
    asked = [
        ([png(0), png(1)][: n % 3], f"Question {n}: what is it?", {"max_tokens": 3 + 3 * n, "temperature": 0.8 * (n % 2), "seed": n})
        for n in range(4)
    ]
    wanted = answers(small, asked)
    with ThreadPoolExecutor(8) as pool:
        whole = [pool.submit(server.ask, *media, words, **settings) for media, words, settings in asked]
        streams = [pool.submit(server.stream, *media, words, stream_options=USAGE, **settings) for media, words, settings in asked]
    for completion, stream, answer in zip((one.result() for one in whole), (one.result() for one in streams), wanted, strict=True):
        assert completion.choices[0].message.content == answer and completion.choices[0].finish_reason == answer.finish
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream[:-1]) == answer
        assert stream[0].choices[0].delta.role == "assistant" and stream[-2].choices[0].finish_reason == answer.finish
        for usage in (completion.usage, stream[-1].usage):
            assert usage is not None and usage.model_extra is not None
            assert (usage.prompt_tokens, usage.completion_tokens) == (answer.tokens.prompt, answer.tokens.generated)
            extra = usage.model_extra
            assert (extra["visual_tokens"], extra["visual_tokens_kept"]) == (answer.tokens.visual, answer.tokens.kept)
    assert server.free()


def test_several_answers_come_whole_and_as_a_stream_with_their_penalties(small: Mini, server: Any) -> None:
    """Each with a seed of its own; the prompt is counted once, and every one takes the place of a request."""
    settings: dict[str, Any] = {"max_tokens": 7, "temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    extra, question, seen = {"repetition_penalty": 0.3}, "What is it?", dict[int, str]()
    wanted = answers(small, [([png(0)], question, settings | extra | {"seed": 5 + place}) for place in range(3)])
    whole = server.ask(png(0), question, n=3, seed=5, extra_body=extra, **settings)
    stream = server.stream(png(0), question, n=3, seed=5, extra_body=extra, stream_options=USAGE, **settings)
    assert [choice.message.content for choice in whole.choices] == wanted and [choice.index for choice in whole.choices] == [0, 1, 2]
    for chunk in stream[:-1]:
        (choice,) = chunk.choices
        seen[choice.index] = seen.get(choice.index, "") + (choice.delta.content or "")
    assert [seen[place] for place in range(3)] == wanted
    ends = [chunk.choices[0].index for chunk in stream[:-1] if chunk.choices[0].finish_reason]
    roles = [chunk.choices[0].index for chunk in stream[:-1] if chunk.choices[0].delta.role]
    assert sorted(ends) == sorted(roles) == [0, 1, 2]
    for usage in (whole.usage, stream[-1].usage):
        assert usage is not None and usage.prompt_tokens == wanted[0].tokens.prompt
        assert usage.completion_tokens == sum(answer.tokens.generated for answer in wanted)
    assert server.free()


def test_logprobs_are_told_as_openai_tells_them(small: Mini, server: Any) -> None:
    answer = Pipeline(small, compression("uniform:8"))([], LONG, max_tokens=6, logprobs=3)
    spelled = [small.tokenizer.decode([one.id]) for one in answer.logprobs]
    whole = server.ask(LONG, max_tokens=6, logprobs=True, top_logprobs=3).choices[0].logprobs
    chunks = server.stream(LONG, max_tokens=6, logprobs=True)
    streamed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content or []]
    assert whole is not None and whole.content is not None
    for found in (whole.content, streamed):
        assert [one.token for one in found] == spelled and all(bytes(one.bytes or []).decode() == one.token for one in found)
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in answer.logprobs], abs=1e-4)
    tops = [[small.tokenizer.decode([other.id]) for other in one.top] for one in answer.logprobs]
    assert [[other.token for other in one.top_logprobs] for one in whole.content] == tops
    assert all(one.top_logprobs == [] for one in streamed)
    assert server.ask(LONG, max_tokens=1).choices[0].logprobs is None


def test_the_bytes_of_tokens_that_are_parts_of_letters_join_to_the_text(server: Any) -> None:
    said = "𓀀é🦊"
    how: dict[str, Any] = {"max_tokens": 30, "logprobs": True, "top_logprobs": 1, "extra_body": {"guided_choice": [said]}}
    whole = server.ask("Say it.", **how).choices[0].logprobs.content
    told = [chunk.choices[0].logprobs for chunk in server.stream("Say it.", **how)]
    streamed = [one for some in told if some for one in some.content or []]
    for found in (whole, streamed):
        assert b"".join(bytes(one.bytes) for one in found).decode().strip() == said
        assert any(one.token == "\ufffd" and bytes(one.bytes) != b"\xef\xbf\xbd" for one in found)


def test_pb_12_stop_strings_end_a_stream_where_they_end_the_whole(small: Mini, server: Any) -> None:
    (answer,) = answers(small, [([], LONG, {"max_tokens": 20})])
    stop = [answer[8:11], answer[5:7]]
    whole = server.ask(LONG, max_tokens=20, stop=stop).choices[0]
    chunks = server.stream(LONG, max_tokens=20, stop=stop)
    assert whole.message.content == answer[: min(answer.index(one) for one in stop)] and whole.finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_pb_12_letters_of_several_tokens_come_whole_and_stop_where_they_should(server: Any) -> None:
    """A token may be one byte of a letter, and a stop string may begin and end amid a token."""
    said = "naïve café 🙂🙃 done"
    for stop, wanted in (([], said), (["é 🙂"], "naïve caf"), ("🙃", "naïve café 🙂"), (["nowhere", "ïve"], "na")):
        how: dict[str, Any] = {"max_tokens": 60, "stop": stop, "extra_body": {"guided_choice": [said]}}
        chunks = server.stream("Say it.", **how)
        assert server.ask("Say it.", **how).choices[0].message.content == wanted
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted


def test_a_conversation_is_read_in_turns_and_another_history_is_another_prompt(small: Mini, server: Any) -> None:
    """CS-08, and PB-04: what looks like a marker is text."""
    history: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Which colour?"},
        {"role": "assistant", "content": "Red.<|im_end|>", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "Sure?"},
    ]
    read = "Be brief.\nQuestion: Which colour?\nAnswer: Red.<|im_end|>\nQuestion: Sure?\nAnswer:"
    with server.client() as asking:
        one = asking.chat.completions.create(model="small", messages=history, max_tokens=12)
        other = asking.chat.completions.create(model="small", messages=history[3:], max_tokens=12)
    assert one.usage is not None and one.usage.prompt_tokens == 1 + len(small.tokenizer.encode(read))
    assert one.choices[0].message.content != other.choices[0].message.content == answers(small, [([], "Sure?", {"max_tokens": 12})])[0]


def test_a_clip_is_seen_as_the_pipeline_sees_it_and_remembered_as_it_remembers(small: Mini, door: Doors) -> None:
    """By a policy, which an engine gives every request for itself."""
    pipe = Pipeline(small, compression("uniform:12"), recall=recalling("snapkv:0.5,window=8,interval=2"))
    with door(Service(pipe, Settings(frames=4), "small")) as server:
        part = {"type": "video_url", "video_url": {"url": server.uri(CLIP.read_bytes(), "video/mp4")}}
        answer = server.ask(part, "What happens?", max_tokens=8)
        assert server.free()
    wanted = pipe(load_video(CLIP, sampling=Settings(frames=4).sampling), "What happens?", max_tokens=8)
    assert answer.choices[0].message.content == wanted and wanted.tokens.kept == 12 < wanted.tokens.visual


def test_models_health_and_paths_that_are_none(server: Any) -> None:
    with server.client() as asking:
        assert [model.id for model in asking.models.list()] == ["small"] and asking.models.retrieve("small").owned_by == "mmsdk"
        with pytest.raises(openai.NotFoundError):
            asking.models.retrieve("org/other")
        with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
            asking.embeddings.create(model="small", input="x")
    assert server.raw(b"", "/v1/models")[0] == 405
    assert server.ask("Hi?", max_tokens=1).object == "chat.completion"
    assert server.raw(b"{}", Origin="https://evil.example")[0] == 403
    assert server.metric('mmsdk_requests_total{status="200"}') > 0 and server.metric("process_resident_memory_bytes") > 0


def test_a_load_loses_nothing_and_leaves_nothing(small: Mini, door: Doors) -> None:
    asking = Asking(requests=20, concurrency=8, cancelled=4, malformed=4, tokens=6)
    with door(Service(Pipeline(small, compression("uniform:8")), Settings(rows=4))) as server:
        row = measured(server.url, "small", asking)
        assert server.metric('mmsdk_requests_total{status="400"}') == 4
    assert [row[key] for key in ("requests", "concurrency", "cancelled", "malformed", "lost", "leaked_blocks")] == [20, 8, 4, 4, 0, 0]
    assert isinstance(row["p95_ttft_ms"], float) and row["p95_ttft_ms"] > 0 and isinstance(row["rss_growth_mb"], float)
    assert [asking.kinds.count(kind) for kind in ("answered", "cancelled", "malformed")] == [12, 4, 4]
