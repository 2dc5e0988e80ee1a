"""The engine against a pipeline that answers one by one: same tokens whatever else is going on, and nothing held afterwards."""

import gc
import resource
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch

from mmsdk.adapters import Adapters
from mmsdk.answer import Answer
from mmsdk.compress import compression
from mmsdk.decoder.adapted import Adapter, Update
from mmsdk.errors import BudgetError, InputError, ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.serve.engine import Engine, Event, Outcome
from mmsdk.serve.job import Job
from mmsdk.vision.encode import Encoder
from mmsdk.vision.types import Image, Media, VisualTokens

Asked = tuple[list[Image], str, GenerationConfig]


def picture(seed: int) -> Image:
    generator = torch.Generator().manual_seed(seed)
    return Image(torch.randint(0, 256, (3, 56, 56), dtype=torch.uint8, generator=generator), f"picture {seed}")


def requests(count: int = 8, most: int = 24) -> list[Asked]:
    """Text, one picture and two; short and long; greedy and drawn."""
    return [
        (
            [picture(seed % 3), picture(1)][: seed % 3],
            f"Question {seed}: " + "what is it that can be seen there? " * (1 + seed % 4 * 2),
            GenerationConfig(max_tokens=3 + seed * 5 % most, temperature=0.0 if seed % 2 else 0.8, seed=seed),
        )
        for seed in range(count)
    ]


def alone(small: Mini, asked: Sequence[Asked], spec: str = "identity") -> list[Answer]:
    pipe = Pipeline(small, compression(spec))
    return [
        pipe(media, words, max_tokens=one.max_tokens, temperature=one.temperature, seed=one.seed, stop=one.stop)
        for media, words, one in asked
    ]


def texts(outcomes: dict[int, Outcome]) -> list[str]:
    return [outcomes[number].text for number in sorted(outcomes)]


@pytest.fixture(scope="module")
def wanted(small: Mini) -> list[Answer]:
    return alone(small, requests())


@pytest.mark.parametrize(("rows", "chunk", "tokens"), [(8, 256, 0), (3, 16, 0), (1, 7, 0), (8, 40, 208)])
def test_every_schedule_gives_the_answers_of_one_by_one(small: Mini, wanted: list[Answer], rows: int, chunk: int, tokens: int) -> None:
    engine = Engine(Pipeline(small), rows=rows, chunk=chunk, tokens=tokens)
    for media, words, config in requests():
        engine.submit(media, words, config)
    outcomes = engine.drain()
    assert texts(outcomes) == wanted
    assert [outcomes[number].finish for number in sorted(outcomes)] == [answer.finish for answer in wanted]
    assert [len(outcomes[number].ids) for number in sorted(outcomes)] == [answer.tokens.generated for answer in wanted]
    assert engine.held == 0 and not engine.busy


@pytest.mark.skipif(sys.platform != "linux", reason="the process is asked as Linux is")
def test_memory_stays_flat_over_many_requests(small: Mini) -> None:
    """Three hundred; every fifth asks about a picture, both repeat now and then, and the first hundred fill what is remembered."""
    engine, held = Engine(Pipeline(small), rows=8, tokens=1024), list[int]()
    for number in range(300):
        media = [picture(number % 40)] if number % 5 == 0 else []
        engine.submit(media, f"Question {number % 70}: what is it?", GenerationConfig(max_tokens=1))
        if number % 20 == 19:
            engine.drain()
            held.append(int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize())
    assert engine.held == 0
    assert max(held[5:]) - held[4] < 8 * 2**20


def test_a_small_pool_sets_requests_aside_and_no_answer_changes(small: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four short questions with long answers, in a pool that holds hardly more than one of them."""
    set_aside, original = list[int](), Engine._wait_again

    def noted(engine: Engine, job: Job) -> None:
        set_aside.append(job.number)
        original(engine, job)

    monkeypatch.setattr(Engine, "_wait_again", noted)
    asked: list[Asked] = [
        ([], f"And {seed}?", GenerationConfig(max_tokens=40, temperature=0.5 * (seed % 2), seed=seed)) for seed in range(4)
    ]
    engine = Engine(Pipeline(small), tokens=64)
    for media, words, config in asked:
        engine.submit(media, words, config)
    assert texts(engine.drain()) == alone(small, asked)
    assert set_aside and engine.held == 0


def test_requests_that_come_later_change_nothing(small: Mini, wanted: list[Answer]) -> None:
    engine, events = Engine(Pipeline(small), rows=4, chunk=32), list[Event]()
    for media, words, config in requests():
        engine.submit(media, words, config)
        events += engine.step()
    while engine.busy:
        events += engine.step()
    said = ["".join(event.text for event in events if event.number == number) for number in range(1, 9)]
    assert said == wanted


def test_compressed_prompts_are_served(small: Mini) -> None:
    asked = requests(4)
    engine = Engine(Pipeline(small, compression("uniform:8")))
    for media, words, config in asked:
        engine.submit(media, words, config)
    assert texts(engine.drain()) == alone(small, asked, "uniform:8")
    with pytest.raises(InputError, match="compress"):
        Engine(Pipeline(small, compression("fastv:0.5")))


@pytest.mark.parametrize(
    ("sizes", "name"), [({"rows": 0}, "rows"), ({"chunk": 1.5}, "chunk"), ({"tokens": -1}, "tokens"), ({"tokens": "a"}, "tokens")]
)
def test_sizes_that_cannot_be_are_refused_by_name(small: Mini, sizes: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(InputError, match=name):
        Engine(Pipeline(small), **sizes)


def test_a_request_without_settings_is_refused_and_harms_nobody(small: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    engine = Engine(Pipeline(small), rows=2)
    nothing: Any = None
    with pytest.raises(InputError, match="config"):
        engine.submit([], "What is it?", nothing)
    number = engine.submit([], "What is it?", GenerationConfig(max_tokens=2))
    assert engine.drain()[number].ids


def test_a_prompt_that_begins_as_an_earlier_one_is_read_from_there(small: Mini) -> None:
    engine, words = Engine(Pipeline(small), chunk=16), "What can be seen in this picture, if anything at all? " * 3
    steps = []
    for _ in range(2):
        engine.submit([picture(0)], words, GenerationConfig(max_tokens=1))
        steps.append(0)
        while engine.busy:
            engine.step()
            steps[-1] += 1
    assert steps[1] == 1 < steps[0]


def test_no_pass_is_spent_on_a_short_rest_or_beginning(small: Mini) -> None:
    """Of chunks of 32: prompts of up to a quarter more go through whole, two of them in a step only where both do; a long one in chunks."""
    read, hook = list[int](), small.decoder.layers[0].register_forward_pre_hook(lambda _, given: read.append(given[0].shape[1]))
    for lengths, passes in {(40,): [40], (20, 12): [20, 12], (20, 30): [20, 30], (41,): [32, 9], (82, 8): [32, 32, 18, 8]}.items():
        engine = Engine(Pipeline(small), chunk=32)
        for number, length in enumerate(lengths):
            # seven tokens around it, and one for every digit
            engine.submit([], str(number) * (length - 7), GenerationConfig(max_tokens=1))
        read.clear()
        engine.drain()
        assert read == passes
    hook.remove()


def test_several_answers_to_one_question_share_what_is_read_once(small: Mini) -> None:
    """Asked at one time by one tenant: the others wait until their prompt is there, and read less than a block of it again."""
    words = "What can be seen in this picture, if anything at all? " * 3
    asked: list[Asked] = [([picture(0)], words, GenerationConfig(max_tokens=5, temperature=0.9, seed=seed)) for seed in range(4)]
    engine, read = Engine(Pipeline(small), chunk=16), list[int]()
    for media, text, config in asked:
        engine.submit(media, text, config)
    hook = small.decoder.layers[0].register_forward_pre_hook(lambda _, given: read.append(given[0].shape[0] * given[0].shape[1]))
    outcomes = engine.drain()
    hook.remove()
    answers = alone(small, asked)
    assert texts(outcomes) == answers and len(set(answers)) == 4
    assert sum(read) <= answers[0].tokens.prompt + 3 * 16 + 4 * 5


def test_cs_12_what_is_wrong_with_one_request_ends_it_alone(small: Mini, wanted: list[Answer]) -> None:
    engine = Engine(Pipeline(small, compression("uniform:1.0")))
    asked = requests(3)
    good = [engine.submit(media, words, config) for media, words, config in asked]
    missing = engine.submit("nowhere.png", "What is it?")
    empty = engine.submit([], "")
    endless = engine.submit([], "Say on.", GenerationConfig(max_tokens=5000))
    outcomes = engine.drain()
    assert [outcomes[number].text for number in good] == wanted[:3]
    assert all(isinstance(outcomes[number].finish, InputError) for number in (missing, empty, endless))
    assert engine.held == 0


def test_cs_12_scores_that_are_not_finite_end_their_request_alone(small: Mini, wanted: list[Answer]) -> None:
    """A word whose embedding is broken: whoever says or hears it gets no number, and the others of the batch do."""
    others = {i for _, words, _ in requests(3) for i in small.tokenizer.encode(f"Question: {words}")}
    broken = [i for i in small.tokenizer.encode("Question: zebra") if i not in others]
    before = small.decoder.embedding.weight[broken].clone()
    try:
        small.decoder.embedding.weight[broken] = torch.nan
        engine = Engine(Pipeline(small))
        good = [engine.submit(media, words, config) for media, words, config in requests(3)]
        bad = engine.submit([], "zebra")
        outcomes = engine.drain()
    finally:
        small.decoder.embedding.weight[broken] = before
    assert isinstance(outcomes[bad].finish, ModelError)
    assert [outcomes[number].text for number in good] == wanted[:3] and engine.held == 0


def test_a_request_that_can_never_fit_is_told_so(small: Mini) -> None:
    engine = Engine(Pipeline(small), tokens=64)
    fits, never = engine.submit([], "Hi?", GenerationConfig(max_tokens=8)), engine.submit([], "Hi?", GenerationConfig(max_tokens=80))
    outcomes = engine.drain()
    assert outcomes[fits].finish in ("stop", "length")
    error = outcomes[never].finish
    assert isinstance(error, InputError) and "the engine holds 64" in str(error)


def test_a_budget_that_does_not_fit_is_that_request_alone(small: Mini) -> None:
    engine = Engine(Pipeline(small, compression("uniform:17")))
    number, text = engine.submit([picture(0)], "What?"), engine.submit([], "What?", GenerationConfig(max_tokens=2))
    outcomes = engine.drain()
    assert isinstance(outcomes[number].finish, BudgetError) and outcomes[text].finish in ("stop", "length")


@pytest.mark.parametrize("steps", [0, 1, 3, 9])
def test_cs_11_a_cancelled_request_frees_all_it_holds_and_the_others_go_on(small: Mini, wanted: list[Answer], steps: int) -> None:
    """While it waits, is read, speaks."""
    engine, events = Engine(Pipeline(small), rows=2, chunk=16), list[Event]()
    numbers = [engine.submit(media, words, config) for media, words, config in requests()]
    for _ in range(steps):
        events += engine.step()
    going = [number for number in numbers if not any(event.number == number and event.finish for event in events)]
    gone = going[0], going[-1]
    assert all(engine.cancel(number) for number in gone) and not engine.cancel(gone[0]) and not engine.cancel(999)
    while engine.busy:
        fresh = engine.step()
        assert not {event.number for event in fresh} & set(gone)
        events += fresh
    for number, answer in zip(numbers, wanted, strict=True):
        if number not in gone:
            assert "".join(event.text for event in events if event.number == number) == answer
    assert engine.held == 0


def test_cs_11_leaving_early_holds_nothing(small: Mini) -> None:
    with Engine(Pipeline(small), chunk=16) as engine:
        for media, words, config in requests():
            engine.submit(media, words, config)
        for _ in range(4):
            engine.step()
        assert engine.held > 0
    assert engine.held == 0 and not engine.busy
    interrupted = Engine(Pipeline(small))

    def interrupt() -> None:
        with interrupted:
            interrupted.submit([], "Hi?")
            interrupted.step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert interrupted.held == 0


def test_a_step_that_is_broken_off_ends_all_requests_and_the_next_are_answered(
    small: Mini, wanted: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C does between the decoder and the token: what the caches hold is then more than what was said."""

    def interrupted(job: Job, likeliest: int, logits: torch.Tensor) -> Event:
        raise KeyboardInterrupt

    engine = Engine(Pipeline(small), rows=4, chunk=32)
    for media, words, config in requests():
        engine.submit(media, words, config)
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Job, "say", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.drain()
    assert engine.held == 0 and not engine.busy
    for media, words, config in requests():
        engine.submit(media, words, config)
    assert texts(engine.drain()) == wanted


def test_blocks_of_who_was_about_to_speak_come_back(small: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken off when its prompt is in the cache of those who speak, and it is not yet among them."""

    class Full(list[Job]):
        def append(self, job: Job) -> None:
            raise KeyboardInterrupt

    engine = Engine(Pipeline(small), rows=4, chunk=64)
    engine.submit([], "What is it?", GenerationConfig(max_tokens=3))
    engine._speaking = Full()
    with pytest.raises(KeyboardInterrupt):
        engine.drain()
    engine.close()
    assert engine.held == 0 and not engine.busy


def test_what_breaks_the_encoder_for_one_ends_it_alone(small: Mini, wanted: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """No error of ours: that of a product, or of memory that there is not."""
    original = Encoder.__call__

    def broken(encoder: Encoder, media: Sequence[Media]) -> list[VisualTokens]:
        if any(one.source == "picture 9" for one in media):
            raise RuntimeError("out of memory")
        return original(encoder, media)

    monkeypatch.setattr(Encoder, "__call__", broken)
    engine = Engine(Pipeline(small), rows=4)
    config = GenerationConfig(max_tokens=2)
    numbers = [engine.submit([picture(seed)], "What is it?", config) for seed in (0, 9, 1)]
    outcomes = engine.drain()
    first, wrong, last = (outcomes[number] for number in numbers)
    assert isinstance(wrong.finish, ModelError) and "out of memory" in str(wrong.finish)
    assert first.ids and last.ids and engine.held == 0


def test_tenants_take_turns_and_share_nothing(small: Mini) -> None:
    """One tenant's ten requests do not keep another's one waiting until they are done."""
    engine, words = Engine(Pipeline(small), rows=1, chunk=16), "What can be seen in this picture, if anything at all?"
    for _ in range(10):
        engine.submit([picture(0)], words, GenerationConfig(max_tokens=2), tenant="many")
    single = engine.submit([picture(0)], words, GenerationConfig(max_tokens=2), tenant="one")
    ended, steps = list[int](), dict[int, int]()
    while engine.busy:
        for event in engine.step():
            steps[event.number] = steps.get(event.number, 0) + 1
            if event.finish is not None:
                ended.append(event.number)
    assert ended.index(single) == 1


def test_prompts_of_tenants_are_read_in_turn(small: Mini) -> None:
    """A short prompt is through after one of another tenant's chunks, not after all three of its long prompts."""
    engine, long = Engine(Pipeline(small), rows=4, chunk=16), "What can be seen in this picture, if anything at all? " * 6
    config = GenerationConfig(max_tokens=2)
    first = [engine.submit([], f"{number}: {long}", config, tenant="many") for number in range(3)]
    single = engine.submit([], "What?", config, tenant="one")
    ended = list[int]()
    while engine.busy:
        ended += [event.number for event in engine.step() if event.finish is not None]
    assert ended[0] == single and ended[1:] == first


def test_who_waits_for_its_twin_holds_up_no_other_tenant(small: Mini) -> None:
    """Another tenant's first word comes in the same step whether or not somebody asks for what is being read."""
    words, came = "What can be seen in this picture, if anything at all? " * 6, list[int]()
    for twins in (1, 3):
        engine, steps = Engine(Pipeline(small), rows=4, chunk=16), 0
        for _ in range(twins):
            engine.submit([picture(0)], words, GenerationConfig(max_tokens=2), tenant="many")
        engine.step()
        other = engine.submit([], "Hi?", GenerationConfig(max_tokens=2), tenant="one")
        while not any(event.number == other for event in engine.step()):
            steps += 1
        came.append(steps)
        engine.close()
        assert engine.held == 0
    assert came == [0, 0]


def test_an_adapter_that_was_unloaded_is_kept_by_nobody(small: Mini) -> None:
    up = torch.randn(48, 2, generator=torch.Generator().manual_seed(0))
    adapter = Adapter("style", b"style", {"layers.0.attention.o": Update(torch.ones(2, 48), up)})
    pipe = Pipeline(small, adapters=Adapters(_known={"style": adapter}))
    engine, alive = Engine(pipe), weakref.ref(up)
    del up, adapter
    for name in ("style", "", "style"):
        engine.submit([], "Hi?", GenerationConfig(max_tokens=3), adapter=name)
    assert all(one.finish == "length" for one in engine.drain().values())
    pipe.unload_adapter("style")
    if alive() is not None:
        # what hangs in a cycle; looked for only then
        gc.collect()
    assert alive() is None


def test_text_comes_as_it_becomes_certain(small: Mini, wanted: list[Answer]) -> None:
    engine, (media, words, config) = Engine(Pipeline(small)), requests()[4]
    engine.submit(media, words, config)
    pieces = list[Event]()
    while engine.busy:
        pieces += engine.step()
    assert len(pieces) > 3 and "".join(piece.text for piece in pieces) == wanted[4]
    assert [piece.finish is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_pictures_of_who_waits_are_encoded_together_and_each_once(small: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one tenant, as many as may come in, with a broken one among them; what another tenant sees is its own."""
    looked, original = list[int](), Encoder.__call__

    def noted(encoder: Encoder, media: Sequence[Media]) -> list[VisualTokens]:
        looked.extend([len(media)] if media else [])
        return original(encoder, media)

    monkeypatch.setattr(Encoder, "__call__", noted)
    engine, config = Engine(Pipeline(small), rows=4), GenerationConfig(max_tokens=2)
    for seed in (0, 1, 0):
        engine.submit([picture(seed)], "What is it?", config)
    broken = engine.submit("nowhere.png", "What is it?", config)
    last = engine.submit([picture(2)], "What is it?", config)
    engine.submit([picture(0)], "What is it?", config, tenant="other")
    outcomes = engine.drain()
    # the last of the first tenant is looked at when there is a row for it
    assert looked[0] == 2 and sorted(looked) == [1, 1, 2]
    assert isinstance(outcomes[broken].finish, InputError) and outcomes[last].ids
    assert outcomes[1].text == outcomes[3].text == outcomes[6].text and engine.held == 0
