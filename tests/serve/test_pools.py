"""Engines over every memory that a pipeline may have, and over models whose tokens see what comes after them.

The truth is the pipeline with the same memory, which answers one by one.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mmsdk.apps.checkpoints.sight import Kind, SightReplica
from mmsdk.compress import compression
from mmsdk.decoder.sight import together
from mmsdk.decoder.spans import Span, between
from mmsdk.errors import InputError
from mmsdk.families import open_model
from mmsdk.generate.config import GenerationConfig
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.recall import recalling
from mmsdk.serve.engine import Engine, Event
from mmsdk.serve.job import Job
from mmsdk.vision.types import Image

Asked = tuple[list[Image], str, GenerationConfig]
POLICIES = ["snapkv:0.4,window=8,interval=4", "quest:0.5", "thinkv:0.5", "rdkv:0.5", "streaming:32"]


def picture(seed: int, height: int = 56, width: int = 56) -> Image:
    generator = torch.Generator().manual_seed(seed)
    return Image(torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator), f"picture {seed}")


def requests(count: int, most: int = 12) -> list[Asked]:
    """Without a picture, with one and with two; short and long; greedy and drawn."""
    return [
        (
            [picture(seed), picture(9, 40, 70)][: seed % 3],
            f"Question {seed}: " + "what is it that can be seen there? " * (1 + seed % 3),
            GenerationConfig(max_tokens=3 + seed * 5 % most, temperature=0.8 * (seed % 2), seed=seed),
        )
        for seed in range(count)
    ]


def alone(pipe: Pipeline, asked: Sequence[Asked]) -> list[str]:
    return [str(pipe(media, words, max_tokens=one.max_tokens, temperature=one.temperature, seed=one.seed)) for media, words, one in asked]


def served(engine: Engine, asked: Sequence[Asked]) -> list[str]:
    """Handed over one in a step, so that some speak while others are read."""
    events = list[Event]()
    for request in asked:
        engine.submit(*request)
        events += engine.step()
    while engine.busy:
        events += engine.step()
    assert engine.held == 0 and all(event.finish is None or isinstance(event.finish, str) for event in events)
    return ["".join(event.text for event in events if event.number == number) for number in range(1, 1 + len(asked))]


@pytest.mark.parametrize("kv", ["int8", "turbo4", *POLICIES])
def test_every_memory_says_in_an_engine_what_it_says_one_by_one(small: Mini, kv: str) -> None:
    """Some prompts are longer than the window that is kept exactly."""
    pipe = Pipeline(small, compression("uniform:8"), recall=recalling(kv))
    asked = [*requests(4), ([picture(1)], "Is it so? " * 60, GenerationConfig(max_tokens=9))]
    assert served(Engine(pipe, rows=3, chunk=32), asked) == alone(pipe, asked)


def test_rounded_blocks_have_room_for_all_that_is_read_in_one_step(small: Mini) -> None:
    """Four prompts at once, each longer than the window that is kept exactly; those of a step age in the next."""
    pipe = Pipeline(small, recall=recalling("int8"))
    asked = [([], f"Question {seed}: " + "is it so? " * 60, GenerationConfig(max_tokens=3)) for seed in range(4)]
    engine = Engine(pipe, rows=4, chunk=1024)
    for one in asked:
        engine.submit(*one)
    outcomes = engine.drain()
    assert [outcomes[number].text for number in sorted(outcomes)] == alone(pipe, asked) and engine.held == 0


def test_what_a_policy_lets_go_of_is_room_for_others(small: Mini) -> None:
    """Five prompts of which two fit at one time as long as nothing is forgotten."""
    together_at = dict[str, int]()
    asked = [([], f"Question {seed}: " + "what is there to be seen? " * 10, GenerationConfig(max_tokens=8)) for seed in range(5)]
    for kv in ("full", "snapkv:24,window=8,interval=4"):
        engine, most = Engine(Pipeline(small, recall=recalling(kv)), rows=6, tokens=200), 0
        for one in asked:
            engine.submit(*one)
        while engine.busy:
            events = engine.step()
            most = max(most, len({event.number for event in events}))
        together_at[kv] = most
    assert together_at["full"] == 2 < together_at["snapkv:24,window=8,interval=4"]


@pytest.mark.parametrize("kv", ["int8", "h2o:40"])
def test_nobody_is_set_aside_and_who_leaves_frees_all(small: Mini, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CS-11, in a pool that holds hardly more than one of them."""

    def never(engine: Engine, job: Job) -> None:
        raise AssertionError(f"{job.number} was set aside")

    monkeypatch.setattr(Engine, "_wait_again", never)
    pipe, asked = Pipeline(small, recall=recalling(kv)), requests(5, most=30)
    engine, events = Engine(pipe, rows=4, chunk=24, tokens=256), list[Event]()
    numbers = [engine.submit(*one) for one in asked]
    for _ in range(2):
        events += engine.step()
    assert engine.held > 0 and engine.cancel(numbers[0]) and engine.cancel(numbers[-1])
    while engine.busy:
        events += engine.step()
    assert engine.held == 0
    said = ["".join(event.text for event in events if event.number == number) for number in numbers[1:-1]]
    assert said == alone(pipe, asked[1:-1])
    engine.submit(*asked[1])
    engine.step()
    engine.close()
    assert engine.held == 0 and not engine.busy


SEEING: list[Kind] = ["gemma3", "paligemma"]


@pytest.fixture(scope="module", params=SEEING)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    SightReplica.write(request.param, path)
    return path


@pytest.mark.parametrize("kv", ["paged", "snapkv:0.5,window=8"])
def test_pictures_whose_tokens_see_each_other_are_read_in_one_piece(folder: Path, kv: str) -> None:
    """Gemma 3, with layers of a short memory, and PaliGemma, in chunks that are shorter than a picture and in a pool for few."""
    pipe = Pipeline(open_model(str(folder), torch.float32, torch.device("cpu")), recall=recalling(kv))
    asked = requests(4, most=7)
    wanted = alone(pipe, asked)
    for chunk, tokens in ((7, 0), (64, max(len(words) for _, words, _ in asked) + 200)):
        assert served(Engine(pipe, rows=3, chunk=chunk, tokens=tokens), asked) == wanted


def test_memories_that_do_not_fit_a_model_are_refused_by_name(folder: Path) -> None:
    pipe = Pipeline(open_model(str(folder), torch.float32, torch.device("cpu")), recall=recalling("int8"))
    with pytest.raises(InputError, match="reads them whole; choose paged"):
        Engine(pipe)


def test_spans_that_see_ahead_are_not_cut() -> None:
    """A clip stands in two runs, with words between them; parts of a row know what they are of."""
    row = (Span(-1, (3,)), Span(0, (4,)), Span(-1, (2,)), Span(0, (4,)), Span(1, (5,)), Span(-1, (1,)))
    assert together("before", row) == () and together("prompt", row) == (range(19),)
    assert together("pictures", row) == (range(3, 13), range(13, 18))
    assert between(row, 2, 8) == (Span(-1, (1,)), Span(0, (4,)), Span(-1, (1,)))
    assert between(row, 13, 19) == (Span(1, (5,)), Span(-1, (1,))) and between(row, 0, 19) == row
