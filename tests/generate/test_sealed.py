"""JSON schemas in processes of their own: what the library itself says of every step, and an end in time to what would have none."""

import contextlib
import errno
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import llguidance
import pytest
import torch

from mmsdk.errors import InputError
from mmsdk.generate import constrain, forks, sealed
from mmsdk.generate.constrain import Constraint, Guide, LostError, guide_of, masked
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.tokenizer import TextTokenizer

V, END = 49152, 2
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,4}\\d?$"},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", 3]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}

pytestmark = pytest.mark.skipif(not sealed.POSSIBLE, reason="this system forks no processes")


def together(pattern: str, count: int) -> dict[str, Any]:
    """Strings that so many patterns match together, each with another number in the place of N."""
    return {"allOf": [{"type": "string", "pattern": pattern.replace("N", str(number))} for number in range(1, count + 1)]}


COSTLY = together("^.*a.{N}$", 39)
# what costs too much stands behind what does not, and in front of it nothing is amiss
LATER: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": together("^(b|c.*a.{N})$", 30)},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def words(small: Mini) -> TextTokenizer:
    assert isinstance(small.tokenizer, TextTokenizer)
    return small.tokenizer


@pytest.fixture
def led(words: TextTokenizer) -> Callable[[dict[str, Any]], Guide]:
    return lambda schema: guide_of(Constraint.of(schema=schema), words, frozenset({END}), V)


def allowed(guide: Guide) -> list[int]:
    return masked(torch.zeros(1, V), [guide])[0].isfinite().nonzero()[:, 0].tolist()


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_every_step_is_the_librarys_own(words: TextTokenizer, led: Callable[[dict[str, Any]], Guide]) -> None:
    """Against its matcher in this process, along drawn answers and their forks."""
    guide = led(SCHEMA)
    theirs = llguidance.LLTokenizer(words.to_json(), n_vocab=V, eos_token=[END])
    matcher = llguidance.LLMatcher(theirs, 'start: " "? body\n' + Constraint.of(schema=SCHEMA).grammar)
    draw = random.Random(0)
    for _ in range(3):
        ours, other = guide.fork(), matcher.deep_copy()
        for step in range(60):
            row = torch.frombuffer(bytearray(other.compute_bitmask()), dtype=torch.uint8)
            wanted = (row[:, None] >> torch.arange(8)).bitwise_and(1).flatten()[:V].nonzero()[:, 0].tolist()
            assert allowed(ours) == wanted and ours.problem is None
            going = [token for token in wanted if token != END]
            if not going or (END in wanted and step > 30):
                break
            token = draw.choice(going)
            ours.push(token)
            assert other.consume_token(token) and ours.complete == other.is_stopped()
            if step % 7 == 3:
                ours = ours.fork()
        assert step > 5


def test_cs_12_a_schema_that_never_ends_compiling_is_refused_in_seconds(small: Mini) -> None:
    """By the pipeline, which has nobody else to wait for, and without its memory."""
    before, began = resident(), time.process_time()
    with pytest.raises(InputError, match="schema: it costs too much: .*make it simpler") as refused:
        Pipeline(small)([], "What?", max_tokens=4, schema=COSTLY, max_time=1.0)
    assert refused.value.item == "schema"
    # this process only waits
    assert resident() - before < 64 * 2**20 and time.process_time() - began < 2


def test_cs_12_a_step_that_never_ends_is_the_end_of_its_form_alone(words: TextTokenizer, led: Callable[[dict[str, Any]], Guide]) -> None:
    guide, other = led(LATER), led(SCHEMA)
    fork = guide.fork()
    for token in words.encode('{"a": 12, "b": "cccaaa'):
        mask = masked(torch.zeros(2, V), [guide, other])
        assert mask[1].isfinite().sum() < V and other.problem is None
        if guide.problem is not None:
            break
        guide.push(token)
    assert guide.problem is not None and guide.problem.item == "schema" and "costs too much" in str(guide.problem)
    assert not guide.complete and fork.problem is None
    allowed(fork)
    assert fork.problem is not None, "its process is gone"
    # and the next answer in this form has another
    again = led(LATER)
    assert again.problem is None and len(allowed(again)) < V


def children(process: int) -> set[int]:
    return {int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not tell of its processes")
def test_processes_end_with_the_answers_that_they_are_for(words: TextTokenizer, led: Callable[[dict[str, Any]], Guide]) -> None:
    first = forks.begun(constrain._vocabulary(words, frozenset({END}), V), os.getpid())._process.pid
    before = children(first)
    guide = led({"const": "nowhere else"})
    (begun,) = children(first) - before
    constrain._compiled.cache_clear()
    gc.collect()
    assert begun in children(first) and guide.problem is None, "an answer holds it"
    del guide
    gc.collect()
    until = time.monotonic() + 30
    while begun in children(first) and time.monotonic() < until:
        time.sleep(0.01)
    assert begun not in children(first)


def interrupted(*_: Any) -> bool:
    raise KeyboardInterrupt


def test_an_order_that_was_interrupted_leaves_no_reply_to_the_next(words: TextTokenizer) -> None:
    cell = forks.Cell(forks.Vocabulary())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cell.order(4.0, "check", 0, "start: what is this")
    assert cell.order(4.0, "check", 0, 'start: "a"') is None and cell.why.startswith(forks.LOST) and cell.gone
    form = Constraint.of(schema={"enum": ["interrupted", 7]}), words, frozenset({END}), V
    wanted, other = allowed(guide_of(*form)), guide_of(*form)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            guide_of(*form)
    assert allowed(guide_of(*form)) == wanted, "the form, which is kept, has another process"
    allowed(other)
    assert isinstance(other.problem, LostError)


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not tell of its processes")


@needs_proc
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGPROF, signal.SIGABRT])
def test_only_the_end_that_a_limit_brings_is_told_as_the_forms_fault(ending: signal.Signals) -> None:
    """A process that the system ends, as where memory is short, is lost, and whoever asks again has another one."""
    sealed.checked('start: "a"')
    first = forks.begun(forks.Vocabulary(), os.getpid())._process.pid
    before, cell = children(first), forks.Cell(forks.Vocabulary())
    assert cell.order(4.0, "check", 0, 'start: "a"') is not None
    (copy,) = children(first) - before
    threading.Timer(0.2, os.kill, (copy, ending)).start()
    grammar = constrain._NO_SPACE + f"body: %json {json.dumps(COSTLY)}"
    assert cell.order(30.0, "check", 0, grammar) is None
    limit = ending in (signal.SIGPROF, signal.SIGABRT)
    assert cell.why.startswith(forks.COSTLY if limit else forks.LOST) and cell.gone


@needs_proc
def test_a_form_that_could_not_be_compiled_again_once_is_not_refused_for_good(words: TextTokenizer) -> None:
    vocabulary = constrain._vocabulary(words, frozenset({END}), V)
    form = Constraint.of(schema={"enum": ["again", 8]}), words, frozenset({END}), V
    before = children(forks.first(vocabulary)._process.pid)
    guide = guide_of(*form)
    wanted = allowed(guide)
    (copy,) = children(forks.first(vocabulary)._process.pid) - before
    os.kill(copy, signal.SIGKILL)
    guide.push(wanted[0])
    assert isinstance(guide.problem, LostError) and "ask again" in str(guide.problem)

    def busy(*_: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forks, "first", busy)
        with pytest.raises(LostError, match="ask again"):
            guide_of(*form)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forks.Cell, "told", lambda *_: forks.COSTLY)
        assert isinstance(guide_of(*form).problem, InputError)
    again = guide_of(*form)
    assert again.problem is None and allowed(again) == wanted


def test_a_first_process_that_cannot_be_begun_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    gc.collect()
    others = list[Any]()
    monkeypatch.setattr(subprocess, "Popen", busy)
    monkeypatch.setattr(sys, "unraisablehook", others.append)
    with pytest.raises(LostError, match="cannot be begun"):
        forks.Cell(forks.Vocabulary(ends=(1, 2, 3)))
    gc.collect()
    assert not others


def test_a_process_that_was_ended_from_outside_is_begun_anew(led: Callable[[dict[str, Any]], Guide]) -> None:
    checking = forks.begun(forks.Vocabulary(), os.getpid())
    os.kill(checking._process.pid, signal.SIGKILL)
    checking._process.wait()
    assert allowed(led({"enum": ["after that", 4]}))


def test_a_program_that_forks_leaves_its_processes_to_its_parent(words: TextTokenizer, led: Callable[[dict[str, Any]], Guide]) -> None:
    """The child has its own for the same form, and the answers of the parent go on."""
    guide, token, (reading, writing) = led(SCHEMA), words.encode('{"')[0], os.pipe()
    child = os.fork()
    if not child:
        # no assertion here: pytest would go on in two processes
        with contextlib.suppress(BaseException):
            own = led(SCHEMA)
            own.push(token)
            guide.push(token)
            carried = str(guide.problem)
            os.write(writing, b"well" if own.problem is None and "forked amid an answer" in carried else b"not so")
        os._exit(0)
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0 and os.read(reading, 9) == b"well"
    os.close(reading)
    guide.push(token)
    assert guide.problem is None and len(allowed(guide)) < V


def test_schemas_that_only_refer_to_themselves_are_met_by_nothing(led: Callable[[dict[str, Any]], Guide]) -> None:
    for schema in ({"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}):
        with pytest.raises(InputError, match="^schema: nothing matches it: no answer has this form$"):
            led(schema)
