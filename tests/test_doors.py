"""What is told of settings that nobody knows, at every door that takes settings by name."""

import dataclasses
import inspect
import re
from collections.abc import Callable

import jaxtyping
import pytest

from mmsdk.diffusion.dit import DiT, DiTConfig
from mmsdk.diffusion.filming import VideoGeneration
from mmsdk.diffusion.imagine import Imaginer
from mmsdk.diffusion.rotary import Spread, Waves
from mmsdk.diffusion.words import Words
from mmsdk.diffusion.world.door import World
from mmsdk.diffusion.world.model import WorldModel
from mmsdk.doors import door
from mmsdk.errors import InputError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.constrain import Constraint
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline, pipeline
from mmsdk.serve.engine import Engine

DOORS: dict[str, Callable[[Pipeline], Callable[..., object]]] = {
    "call": lambda pipe: pipe,
    "stream": lambda pipe: pipe.stream,
    "ask": lambda pipe: pipe.stream_session("streaming:64").ask,
    "config": lambda pipe: GenerationConfig,
    "replace": lambda pipe: lambda *_, **settings: dataclasses.replace(GenerationConfig(), **settings),
}


def imaginer() -> Imaginer:
    spread = Spread(4)
    config = DiTConfig(3, 3, 1, 12, 16, 1, 8, spread, (1, 4, 4), frequencies=8, order="channels_first", standing=Waves(spread))
    return Imaginer(DiT(config), Words(("a", "ball"), 8, 4))


OTHERS: dict[str, tuple[str, str, Callable[[Pipeline], Callable[..., object]]]] = {
    "pipeline": ("quantise", "quantize", lambda pipe: pipeline),
    "chat": ("sytem", "system", lambda pipe: pipe.chat),
    "said": ("configs", "config", lambda pipe: pipe.chat()),
    "session": ("windows", "window", lambda pipe: pipe.stream_session),
    "watch": ("held", "hold", lambda pipe: pipe.watch),
    "engine": ("row", "rows", lambda pipe: Engine),
    "clip": ("step", "steps", lambda pipe: VideoGeneration(imaginer())),
    "reset": ("seeds", "seed", lambda pipe: World(WorldModel(imaginer())).reset),
    "step": ("act", "action", lambda pipe: World(WorldModel(imaginer())).step),
    "submit": ("tenent", "tenant", lambda pipe: Engine(pipe).submit),
}


@pytest.mark.parametrize("name", DOORS)
def test_a_misspelt_setting_is_told_what_was_meant(small: Mini, name: str) -> None:
    with pytest.raises(InputError, match="temprature: there is no such setting; did you mean 'temperature'\\? there is .*max_tokens"):
        DOORS[name](Pipeline(small))("What is it?", temprature=1.0)


@pytest.mark.parametrize("name", OTHERS)
def test_likewise_of_the_doors_with_settings_of_their_own(small: Mini, name: str) -> None:
    wrong, meant, opened = OTHERS[name]
    with pytest.raises(InputError, match=f"{wrong}: there is no such setting; did you mean '{meant}'\\?"):
        opened(Pipeline(small))(**{wrong: 1})


def test_what_is_near_nothing_is_told_what_there_is(small: Mini) -> None:
    with pytest.raises(InputError, match="colour: there is no such setting; there is config$"):
        Pipeline(small).chat()("What is it?", colour=1.0)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "written"),
    [("max_tokens", "max_tokens=..."), ("max_new_tokens", "max_tokens=..."), ("choice", "constraint=Constraint.of(choice=...)")],
)
def test_a_conversation_is_told_where_settings_go(small: Mini, name: str, written: str) -> None:
    chat = Pipeline(small).chat()
    for ask in (chat, chat.stream, Pipeline(small).chat):
        with pytest.raises(InputError, match=re.escape(f"it goes into the settings: config=GenerationConfig({written}); ")):
            ask("What is it?", **{name: 4})  # type: ignore[operator]
    config = GenerationConfig(constraint=Constraint.of(choice=["yes"])) if name == "choice" else GenerationConfig(max_tokens=4)
    assert chat("What is it?", config=config)


def test_a_stream_answers_one_question_once(small: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    # users run without type checks
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    pipe = Pipeline(small)
    with pytest.raises(InputError, match=r"n: .*a stream answers one question, once: pipe\("):
        pipe.stream([], "What is it?", n=2)  # type: ignore[call-arg]
    for pairs in ([("a.png", "What?"), ("b.png", "Which?")], [([], "What?")]):
        with pytest.raises(InputError, match=r"question: a stream answers one question, once: .*pipe\(\[\.\.\.\]\)"):
            pipe.stream(pairs)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the question is missing"):
        pipe.stream(["a.png", "b.png"])


def test_a_function_stays_what_it_was() -> None:
    def plain(number: int, /, factor: int = 2) -> int:
        """Multiplies."""
        return number * factor

    opened = door(plain)
    assert opened(3, factor=4) == 12 and opened(3) == 6
    assert inspect.signature(opened) == inspect.signature(plain) and opened.__doc__ == plain.__doc__
    assert "temperature" in inspect.signature(Pipeline.__call__).parameters and GenerationConfig(7).max_tokens == 7
    with pytest.raises(InputError, match="^number: it is missing; there is number, factor"):
        opened()  # type: ignore[call-arg]


def test_what_is_missing_or_too_much_is_told_and_a_mistake_within_is_left_alone(small: Mini) -> None:
    pipe = Pipeline(small)
    with pytest.raises(InputError, match="^name: it is missing; there is path, name$"):
        pipe.load_adapter("nope")  # type: ignore[call-arg]
    with pytest.raises(InputError, match="^question: the question is missing; write pipe.stream"):
        pipe.stream("photo.jpg")
    with pytest.raises(InputError, match="^media: it is missing"):
        pipe()  # type: ignore[call-overload]
    with pytest.raises(InputError, match="^load_adapter: too many positional arguments; there is path, name"):
        pipe.load_adapter("nope", "a", "b")  # type: ignore[call-arg]

    def wrong(number: int) -> int:
        return number + "1"  # type: ignore[operator,no-any-return]

    with pytest.raises(TypeError, match="unsupported operand"):
        door(wrong)(1)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("do_sample", "temperature=0 is greedy"),
        ("max_length", "max_tokens counts"),
        ("max_new_tokens", "it is called max_tokens"),
        ("images", "comes first, without names"),
        ("text", "comes first, without names"),
        ("num_return_sequences", "it is called n"),
        ("kv", r"the model is opened with it: mmsdk.pipeline\(kv=...\)"),
        ("quantize", r"mmsdk.pipeline\(quantize=...\)"),
        ("torch_dtype", r"mmsdk.pipeline\(dtype=...\)"),
        ("device_map", r"mmsdk.pipeline\(device=...\)"),
        ("streamer", "pipe.stream"),
    ],
)
def test_names_of_transformers_are_told_what_does_the_same_here(small: Mini, name: str, told: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: there is no such setting; .*{told}.*; there is media, question"):
        Pipeline(small)([], "What?", **{name: 1})  # type: ignore[call-overload]


def test_and_so_are_settings_of_the_other_door(small: Mini) -> None:
    with pytest.raises(InputError, match="^torch_dtype: .*it is called dtype"):
        pipeline(torch_dtype="float32")  # type: ignore[call-overload]
    with pytest.raises(InputError, match="^temperature: .*it goes with each question"):
        pipeline(temperature=0.5)  # type: ignore[call-overload]
    with pytest.raises(InputError, match="^images: there is no such setting; there is config$"):
        Pipeline(small).chat()("What?", images=[])  # type: ignore[call-overload]
