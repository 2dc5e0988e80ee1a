"""What several threads do to one stream, clip or conversation at one time: nothing is lost, and what waits for what is what is written.

Where one thread must come amid what another does, it is started from there, so that no test hopes for luck.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import mmsdk.chat
import mmsdk.stream
from mmsdk.chat import Chat
from mmsdk.compress import compression
from mmsdk.errors import InputError
from mmsdk.exclusive import Exclusive
from mmsdk.generate.config import GenerationConfig
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.recall import recalling
from mmsdk.stream import StreamSession
from mmsdk.watch import Arrived

SOON, LONG = 0.2, 60.0
SHORT = GenerationConfig(max_tokens=4)


def frames_of(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, 3, 56, 56), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def shown(stream: StreamSession, frames: Tensor, first: float = 0.0) -> StreamSession:
    for number, pixels in enumerate(frames):
        stream.push(pixels, first + number)
    return stream


class Aside:
    """Does something in a thread of its own, and keeps what that raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work, self._done = work, Future[object]()

    def begin(self, seconds: float) -> bool:
        """Whether it is done after at most so long."""
        self._done = ThreadPoolExecutor(1).submit(self._work)
        return self.done(seconds)

    def done(self, seconds: float = LONG) -> bool:
        return bool(wait([self._done], seconds).done)

    @property
    def raised(self) -> BaseException | None:
        return self._done.exception(LONG)


def amid(monkeypatch: pytest.MonkeyPatch, place: object, name: str, work: Callable[[], object]) -> None:
    """The first call of a function begins with some work."""
    own, left = getattr(place, name), [work]

    def called(*given: Any, **settings: Any) -> Any:
        if left:
            left.pop()()
        return own(*given, **settings)

    monkeypatch.setattr(place, name, called)


@pytest.fixture
def pipe(small: Mini) -> Pipeline:
    return Pipeline(small)


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def test_one_thread_at_a_time_and_never_the_same_one_twice() -> None:
    alone = Exclusive("thing")
    with alone:
        other = Aside(lambda: alone.__enter__())
        assert not other.begin(SOON)
        with pytest.raises(InputError, match="thing: this thread is still changing it"), alone:
            pass
        with copy.deepcopy(alone):
            pass
    assert other.done() and not other.raised
    broken = Exclusive("thing")
    with pytest.raises(KeyboardInterrupt), broken:
        raise KeyboardInterrupt
    assert Aside(lambda: broken.__enter__()).begin(LONG)


def test_who_is_interrupted_at_the_door_holds_nothing() -> None:
    """Though the traceback is still there."""
    alone = Exclusive("thing")

    def interrupt(frame: object, event: str, called: Any) -> None:
        if event == "c_return" and called.__name__ == "acquire":
            sys.setprofile(None)
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt) as raised:
        alone.__enter__()
    sys.setprofile(before)
    assert Aside(lambda: alone.__enter__()).begin(LONG) and raised.tb is not None


def test_what_is_pushed_amid_an_answer_that_is_kept_comes_behind_it(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames and words alike; the stream is then what it is where the same came one after another."""
    frames = frames_of(9, seed=1)
    stream, serial = (shown(pipe.stream_session("window:256", window=4), frames[:4]) for _ in range(2))
    other = Aside(lambda: shown(stream, frames[4:], 4.0).say("A cup falls."))
    with monkeypatch.context() as patch:
        amid(patch, mmsdk.stream, "generate", lambda: other.begin(SOON))
        answer = stream.ask("What is it?", max_tokens=4, keep=True)
    assert other.done() and not other.raised and stream.frames == 9
    assert serial.ask("What is it?", max_tokens=4, keep=True) == answer
    shown(serial, frames[4:], 4.0).say("A cup falls.")
    for layer in range(3):
        assert torch.equal(stream.cache.view(layer).keys, serial.cache.view(layer).keys)


def test_a_question_that_is_not_kept_holds_nobody_off(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is about the stream as it was; frames, words and another question are through before it is answered."""
    frames = frames_of(12, seed=2)
    stream, silent = (shown(pipe.stream_session("window:256", window=4), frames[:6]) for _ in range(2))
    wanted = silent.ask("What is it?", max_tokens=4)

    def go_on(one: StreamSession) -> None:
        shown(one, frames[6:], 6.0).say("A cup falls.")
        one.ask("And this?", max_tokens=2, keep=True)

    other, done = Aside(lambda: go_on(stream)), list[bool]()
    with monkeypatch.context() as patch:
        amid(patch, mmsdk.stream, "generate", lambda: done.append(other.begin(LONG)))
        assert stream.ask("What is it?", max_tokens=4) == wanted
    assert done == [True] and not other.raised
    go_on(silent)
    for layer in range(3):
        assert torch.equal(stream.cache.view(layer).keys, silent.cache.view(layer).keys)
    assert stream.frames == 12


@pytest.mark.parametrize("kv", ["window:64", "streaming:64", "h2o:64", "tiered:64", "snapkv:64,window=8,interval=8"])
def test_a_stream_that_is_fed_by_one_thread_and_asked_by_another_loses_no_frame(pipe: Pipeline, hasty: None, kv: str) -> None:
    stream, frames = pipe.stream_session(kv, window=4), frames_of(30, seed=3)
    shown(stream, frames[:1])

    def ask() -> None:
        for number in range(4):
            stream.ask("What?", max_tokens=2, keep=number % 2 == 0)

    others = [Aside(lambda: shown(stream, frames[1:], 1.0)), Aside(ask), Aside(ask)]
    for other in others:
        other.begin(0)
    assert all(other.done() and not other.raised for other in others)
    # a question that is kept has what waits read early
    serial = shown(pipe.stream_session(kv, window=4), frames)
    for one in (stream, serial):
        one.ask("What?", max_tokens=1, keep=True)
    assert stream.frames == 30 and stream.kept == serial.kept


def test_who_changes_a_stream_amid_its_own_kept_answer_is_told(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for itself. The stream is as it was, and goes on; a question that is not kept is no change."""
    frames = frames_of(5, seed=4)
    stream = shown(pipe.stream_session("window:256", window=4), frames[:4])
    held = stream.held
    for again in (
        lambda: stream.push(frames[4], 9.0),
        lambda: stream.say("A cup falls."),
        lambda: stream.ask("And?", max_tokens=1, keep=True),
    ):
        with monkeypatch.context() as patch:
            amid(patch, mmsdk.stream, "generate", again)
            with pytest.raises(InputError, match="stream: this thread is still changing it"):
                stream.ask("What?", max_tokens=2, keep=True)
    assert (stream.held, stream.frames) == (held, 4)
    with monkeypatch.context() as patch:
        amid(patch, mmsdk.stream, "generate", lambda: stream.ask("And?", max_tokens=1))
        stream.ask("What?", max_tokens=2, keep=True)
    assert stream.held > held and Aside(lambda: stream.push(frames[4], 9.0)).begin(LONG) and stream.frames == 5


def test_a_kept_answer_that_is_broken_off_lets_the_others_go_on(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = shown(pipe.stream_session("window:256", window=4), frames_of(4, seed=5))

    def end(by: BaseException) -> None:
        raise by

    for error in (KeyboardInterrupt(), MemoryError()):
        with monkeypatch.context() as patch:
            amid(patch, mmsdk.stream, "generate", partial(end, error))
            with pytest.raises(type(error)):
                stream.ask("What?", max_tokens=2, keep=True)
    other = Aside(lambda: shown(stream, frames_of(4, seed=6), 4.0))
    assert other.begin(LONG) and not other.raised and stream.frames == 8


def test_frames_of_a_watch_wait_for_one_another(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a window goes through the encoder another thread's frame is behind it."""
    frames = frames_of(5, seed=7)
    watch, serial = (pipe.watch("simplecluster", hold=512, window=4) for _ in range(2))
    for number, pixels in enumerate(frames):
        serial.push(pixels, float(number))
    for number in range(3):
        watch.push(frames[number], float(number))
    other = Aside(lambda: watch.push(frames[4], 4.0))
    with monkeypatch.context() as patch:
        amid(patch, Arrived, "seen", lambda: other.begin(SOON))
        watch.push(frames[3], 3.0)
    assert other.done() and not other.raised
    assert watch.encoded().frames == 5 and torch.equal(watch.encoded().tokens.features, serial.encoded().tokens.features)


def test_a_clip_so_far_is_that_of_one_time(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that comes while the others are looked at belongs to the next one."""
    frames, watch = frames_of(4, seed=8), pipe.watch("simplecluster", hold=512, window=4)
    for number in range(3):
        watch.push(frames[number], float(number))
    other = Aside(lambda: watch.push(frames[3], 3.0))
    with monkeypatch.context() as patch:
        amid(patch, Arrived, "seen", lambda: other.begin(LONG))
        seen = watch.encoded()
    assert other.done() and (seen.frames, seen.tokens.grid[0]) == (3, 3) and watch.encoded().frames == 4


def replayed(small: Mini, chat: Chat, kv: str) -> None:
    """One thread that asks the same in the same order is answered the same."""
    alone = Pipeline(small, compression("identity"), recall=recalling(kv)).chat(config=SHORT)
    for turn in chat.turns:
        assert alone(turn.question).ids == turn.answer.ids


def test_a_question_that_comes_as_an_answer_ends_is_behind_it(small: Mini, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = pipe.chat(config=SHORT)
    other = Aside(lambda: chat("And beside it?"))
    with monkeypatch.context() as patch:
        amid(patch, mmsdk.chat, "Exchange", lambda: other.begin(SOON))
        chat("What is it?")
    assert other.done() and not other.raised
    assert [turn.question for turn in chat.turns] == ["What is it?", "And beside it?"]
    replayed(small, chat, "dense")


@pytest.mark.parametrize("kv", ["dense", "paged", "int4"])
def test_a_conversation_of_several_threads_loses_no_turn_without_a_word(small: Mini, hasty: None, kv: str) -> None:
    """Who was overtaken is told; all others are turns, whose answers are those of a conversation that one thread has."""
    chat = Pipeline(small, compression("identity"), recall=recalling(kv)).chat(config=SHORT)
    counted, overtaken = list[str](), list[InputError]()

    def ask(name: str) -> None:
        for number in range(3):
            try:
                chat(f"{name} {number}?")
                counted.append(f"{name} {number}?")
            except InputError as error:
                overtaken.append(error)

    others = [Aside(partial(ask, name)) for name in ("What", "Which", "Where")]
    for other in others:
        other.begin(0)
    assert all(other.done() and not other.raised for other in others)
    assert sorted(counted) == sorted(turn.question for turn in chat.turns) and counted
    assert len(counted) + len(overtaken) == 9 and all("gone on without it" in str(error) for error in overtaken)
    replayed(small, chat, kv)
