"""A stream of real parts at a small size: it is what a prompt of the same would be, stays as it was when asked, and does not grow."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mmsdk.compress import compression
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.rope import Dynamic, Sections
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import BudgetError, InputError, ModelError, PluginError
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.stream import StreamSession
from mmsdk.vision.types import Video


def frames_of(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, 3, 56, 56), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def clip(frames: Tensor) -> Video:
    return Video(frames, torch.arange(len(frames)).float())


def shown(stream: StreamSession, frames: Tensor, first: float = 0.0) -> StreamSession:
    for number, pixels in enumerate(frames):
        stream.push(pixels, first + number)
    return stream


def entries(stream: StreamSession) -> int:
    return stream.held


@pytest.fixture
def pipe(small: Mini) -> Pipeline:
    return Pipeline(small)


@pytest.mark.parametrize(("count", "compress"), [(3, "identity"), (10, "identity"), (8, "simplecluster:5")])
def test_while_everything_is_held_it_is_the_prompt(small: Mini, count: int, compress: str) -> None:
    """A stream in windows of four frames is a question about as many clips; also where the last window is not full."""
    pipe, frames = Pipeline(small, compression(compress)), frames_of(count)
    stream = shown(pipe.stream_session("window:256", window=4), frames)
    wanted = pipe([clip(part) for part in frames.split(4)], "What happens?", max_tokens=6)
    for _ in range(2):
        answer = stream.ask("What happens?", max_tokens=6)
        assert str(answer) == str(wanted) and answer.finish == wanted.finish
        assert (answer.tokens.visual, answer.tokens.kept, answer.tokens.prompt) == (
            wanted.tokens.visual,
            wanted.tokens.kept,
            wanted.tokens.prompt,
        )
    assert stream.frames == count and answer.timings.prefill > 0


def test_asking_leaves_the_stream_as_it_was(pipe: Pipeline) -> None:
    """Two questions from one saved beginning answer as if each were the only one, and frames that come later too (KA-22)."""
    frames = frames_of(12, seed=1)
    asked, silent = (pipe.stream_session("window:64", window=4) for _ in range(2))
    for number, pixels in enumerate(frames):
        asked.push(pixels, float(number))
        silent.push(pixels, float(number))
        if number in (2, 7):
            asked.ask("What is it?", max_tokens=3)
            asked.ask("Which colour?", max_tokens=2)
    for layer in range(3):
        assert torch.equal(asked.cache.view(layer).keys, silent.cache.view(layer).keys)
        assert torch.equal(asked.cache.view(layer).positions, silent.cache.view(layer).positions)
    assert asked.ask("What is it?", max_tokens=4) == silent.ask("What is it?", max_tokens=4)


def test_a_kept_answer_is_part_of_the_stream(small: Mini, pipe: Pipeline) -> None:
    stream = shown(pipe.stream_session("window:256", window=4), frames_of(4, seed=2))
    before = entries(stream)
    answer = stream.ask("What is it?", max_tokens=5, keep=True)
    said = len(small.tokenizer.encode("Question: What is it?\nAnswer:")) + 5 + len(small.tokenizer.encode("\n"))
    assert answer.tokens.generated == 5 and entries(stream) == before + said
    assert stream.ask("And now?", max_tokens=5).tokens.recalled == before + said
    # frames that waited were read before the question
    stream.push(frames_of(1, seed=3)[0], 9.0)
    stream.ask("What?", max_tokens=1, keep=True)
    assert entries(stream) > before + said + 4


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 3.0, "logprobs": 2},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"regex": "[a-f]{3}-[0-9]"},
        {"choice": ["a red cup", "a cow"], "temperature": 2.0, "seed": 3},
        {"schema": {"type": "object", "properties": {"seen": {"type": "boolean"}}, "required": ["seen"]}},
        {"max_time": 1e-9},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_an_answer_are_the_pipelines(pipe: Pipeline, settings: dict[str, Any]) -> None:
    """The same as of a question about the clips; words of the stream count to a repetition penalty as those of a prompt."""
    stream, frames = pipe.stream_session("window:256", window=4), frames_of(8, seed=8)
    shown(stream, frames)
    answer = stream.ask("What happens?", max_tokens=10, **settings)
    wanted = pipe([clip(part) for part in frames.split(4)], "What happens?", max_tokens=10, **settings)
    assert str(answer) == str(wanted) and answer.finish == wanted.finish and answer.ids == wanted.ids
    assert [said.id for said in answer.logprobs] == [said.id for said in wanted.logprobs]
    assert all(abs(a.logprob - b.logprob) < 1e-3 for a, b in zip(answer.logprobs, wanted.logprobs, strict=True))
    assert "max_time" not in settings or (answer.finish, answer.tokens.generated) == ("time", 1)


def test_settings_that_cannot_be_are_told_before_anything_is_read(pipe: Pipeline) -> None:
    stream = shown(pipe.stream_session("window:64", window=4), frames_of(2))
    for wrong, item in (({"regex": "a", "choice": ["b"]}, "regex choice"), ({"logprobs": -1}, "logprobs")):
        with pytest.raises(InputError) as told:
            stream.ask("What?", **wrong)
        assert told.value.item == item
    assert stream.kept == 0


def test_a_stream_wears_its_adapters_in_all_that_it_reads(small: Mini, tmp_path: Path) -> None:
    """The answer is that of a pipeline which wears them for the whole prompt, and another one than without."""
    pipe, frames = Pipeline(small), frames_of(8, seed=9)
    pipe.load_adapter(lora(tmp_path / "style", small.decoder.config), "style")
    clips = [clip(part) for part in frames.split(4)]
    answers = {}
    for adapter in ("style", ""):
        stream = shown(pipe.stream_session("window:256", window=4, adapter=adapter), frames)
        answers[adapter] = stream.ask("What happens?", max_tokens=6)
        assert answers[adapter] == pipe(clips, "What happens?", max_tokens=6, adapter=adapter)
    assert answers["style"] != answers[""]
    with pytest.raises(InputError, match="did you mean 'style'"):
        pipe.stream_session("window:64", adapter="stile")


def lora(folder: Path, config: DecoderConfig) -> Path:
    """An adapter of queries in PEFT's format."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(1), dict[str, Tensor]()
    for layer in range(config.layers):
        place = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{place}.lora_A.weight"] = torch.randn(2, config.width, generator=generator)
        tensors[f"{place}.lora_B.weight"] = torch.randn(config.heads * config.head_dim, 2, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def test_words_stand_where_they_come(small: Mini, pipe: Pipeline) -> None:
    """The frames in front of them are read first, though their window is not full; after, the next window begins."""
    stream, frames = pipe.stream_session("window:256", window=4), frames_of(6, seed=4)
    stream.say("A table.")
    shown(stream, frames[:2])
    stream.say("A cup.")
    words = [len(small.tokenizer.encode(f"{text}\n")) for text in ("A table.", "A cup.")]
    assert entries(stream) == 1 + sum(words) + 2 * 4
    other = pipe.stream_session("window:256", window=4)
    shown(other, frames[:2])
    other.say("A table.")
    other.say("A cup.")
    assert entries(other) == entries(stream) and not torch.allclose(other.cache.view(1).keys, stream.cache.view(1).keys, atol=1e-2)
    # a stream may be words alone
    talk = pipe.stream_session("window:32")
    for number in range(8):
        talk.say(f"The number is {number}.")
    assert entries(talk) == 32 and talk.ask("Which number?", max_tokens=2).tokens.visual == 0


@pytest.mark.parametrize("kv", ["streaming:64", "keydiff:64,interval=1", "omnitide:64,interval=1"])
def test_many_frames_take_no_more_memory_and_no_more_work(pipe: Pipeline, kv: str) -> None:
    """As many tokens go through the decoder for every window, and nothing that was read is read again."""
    stream, read = pipe.stream_session(kv, window=4), list[int]()
    frames, decoder = frames_of(8, seed=5), pipe.vlm.decoder
    assert isinstance(decoder, Decoder)
    handle = decoder.layers[0].register_forward_hook(lambda module, inputs, output: read.append(output.shape[1]))
    sizes = list[int]()
    for number in range(64):
        stream.push(frames[number % 8], number / 25)
        assert stream.held <= 64
        sizes.append(stream.cache.nbytes)
    handle.remove()
    assert read == [16] * 16 and stream.frames == 64 and max(sizes[31:]) == max(sizes[47:])
    # positions are given again
    assert int(stream.cache.position[0]) <= 128
    assert stream.ask("What?", max_tokens=4).tokens.visual == 64 * 4


@pytest.mark.parametrize("kv", ["tova:64", "window:64", "streaming:64"])
def test_positions_close_up_behind_what_goes(pipe: Pipeline, kv: str) -> None:
    """While 64 tokens are held, positions reach 128 at most; closing up changes no value and keeps the order."""
    stream = shown(pipe.stream_session(kv, window=4), frames_of(24, seed=7))
    cache = stream.cache.fork()
    before = [cache.view(layer) for layer in range(3)]
    cache.close_up()
    for layer, old in enumerate(before):
        new = cache.view(layer)
        assert new.positions.tolist() == [list(range(64))] and torch.equal(new.values, old.values)
        # turned by a rotation, a key is as long as it was
        torch.testing.assert_close(new.keys.norm(dim=-1), old.keys.norm(dim=-1))
        by = (new.positions - old.positions)[0].double()[:, None] * 10_000.0 ** -(torch.arange(6).double() / 6)
        turned = torch.complex(*old.keys.double().chunk(2, -1)) * torch.polar(torch.ones_like(by), by)
        torch.testing.assert_close(new.keys, torch.cat((turned.real, turned.imag), -1).float(), rtol=1e-4, atol=1e-4)
    assert cache.position.tolist() == [64] and cache.next(0) is cache.next(2)
    assert int(stream.cache.position[0]) > 64


def test_sinks_come_back_as_they_were(pipe: Pipeline) -> None:
    """Whatever went in between: no rounding adds up in what a stream holds for ever."""
    whole, stream = (shown(pipe.stream_session(kv, window=4), frames_of(64, seed=11)) for kv in ("window:400", "streaming:64"))
    cache = stream.cache.fork()
    cache.close_up()
    for layer in range(3):
        assert torch.equal(cache.view(layer).keys[:, :, :4], whole.cache.view(layer).keys[:, :, :4])
        assert not torch.equal(stream.cache.view(layer).keys[:, :, :4], whole.cache.view(layer).keys[:, :, :4])


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("kv", ["tiered:64,interval=16", "thinkv:200", "omnitide:64"])
def test_a_stream_goes_on_behind_the_context_of_its_model(pipe: Pipeline, kv: str, ahead: int) -> None:
    """Means and rounded tokens close up as others do: what they hold is turned, no value changes, and an answer can still be given.

    Where words stand some places ahead of their positions, everything is turned back by as much, and they then stand there.
    """
    stream, frames = pipe.stream_session(kv, window=4), frames_of(8, seed=10)
    for number in range(152):
        stream.push(frames[number % 8], float(number))
        assert int(stream.cache.position[0]) <= pipe.vlm.context == 512
    assert stream.ask("What?", max_tokens=4).tokens.visual == 4 * 152 > 512
    cache = stream.cache.fork()
    before = [cache.view(layer) for layer in range(3)]
    cache.turn(cache.position + ahead)
    cache.close_up()
    assert cache.shift.tolist() == [0]
    for layer, old in enumerate(before):
        new, real = cache.view(layer), old.valid[0]
        assert torch.equal(new.valid, old.valid) and torch.equal(new.values[:, :, real], old.values[:, :, real])
        # as many places as there are different ones, in the same order
        assert new.positions[0, real].tolist() == old.positions[0, real].unique(return_inverse=True)[1].tolist()
        by = (new.positions - old.positions - ahead)[0, real].double()[:, None] * 10_000.0 ** -(torch.arange(6).double() / 6)
        turned = torch.complex(*old.keys[:, :, real].double().chunk(2, -1)) * torch.polar(torch.ones_like(by), by)
        torch.testing.assert_close(new.keys[:, :, real], torch.cat((turned.real, turned.imag), -1).float(), rtol=1e-3, atol=1e-3)
    assert int(cache.position[0]) < int(stream.cache.position[0])


def test_what_cannot_be_streamed_is_refused(small: Mini, pipe: Pipeline) -> None:
    for compress, hint in (("tome:0.5", "inside"), ("fastv:0.5", "inside"), ("cdpruner:0.5", "question")):
        with pytest.raises(PluginError, match=hint):
            Pipeline(small, compression(compress)).stream_session("window:64")
    with pytest.raises(InputError, match="window of 1"):
        pipe.stream_session("window:64", window=1)
    lasting = (("snapkv:64", "interval=1"), ("full", "nothing"), ("h2o:64,dense=1", "leave dense out"))
    for kv, hint in (("dense", "bounds no stream"), ("quest:64", "choose another policy$"), *lasting):
        with pytest.raises(PluginError, match=hint):
            pipe.stream_session(kv)
    with pytest.raises(BudgetError, match="no length"):
        pipe.stream_session("window:0.5")
    with pytest.raises(BudgetError, match="whose context is 512"):
        pipe.stream_session("window:513")
    # what nobody asked for is made to fit, and what was asked for is not
    with pytest.raises(BudgetError, match="streaming:1024 holds more"):
        pipe.stream_session("streaming:1024")
    assert shown(pipe.stream_session(window=4), frames_of(72)).held == 256
    turned = Decoder.of(replace(small.decoder.config, rope_sections=Sections((2, 2, 2))), small.decoder.state_dict())
    with pytest.raises(ModelError, match="several axes"):
        Pipeline(replace(small, decoder=turned)).stream_session("h2o:64")
    growing = Decoder.of(replace(small.decoder.config, rope_scaling=Dynamic(2.0, 64)), small.decoder.state_dict())
    with pytest.raises(ModelError, match="cannot be moved"):
        Pipeline(replace(small, decoder=growing)).stream_session("window:64")


@pytest.mark.parametrize(
    ("kv", "window", "compress", "told"),
    [
        ("window:24", 8, "identity", "^stream: 32 tokens come at one time, and 24 are held; hold more, compress more, or .*: window=6$"),
        ("h2o:12", 8, "uniform:0.5", "^stream: 16 tokens come at one time, and 12 are held; .*: window=6$"),
        ("window:7", 8, "identity", "^stream: 32 tokens .* 7 are held; hold more, compress more: two frames are 8$"),
    ],
)
def test_a_window_that_is_not_held_is_told_at_the_first_frame(small: Mini, kv: str, window: int, compress: str, told: str) -> None:
    """The small model sees four tokens in every frame. What is advised is held, and one frame more is not."""
    pipe = Pipeline(small, compression(compress))
    stream = pipe.stream_session(kv, window=window)
    with pytest.raises(InputError, match=told) as refused:
        shown(stream, frames_of(1))
    assert stream.frames == 0
    for advised in (int(found) for found in re.findall(r"window=(\d+)", str(refused.value))):
        assert shown(pipe.stream_session(kv, window=advised), frames_of(2 * advised)).frames == 2 * advised
        with pytest.raises(InputError, match="at one time"):
            shown(pipe.stream_session(kv, window=advised + 1), frames_of(1))
    # of a count it does not matter how many come
    assert shown(Pipeline(small, compression("uniform:5")).stream_session(kv, window=window), frames_of(8)).kept == 5


def test_of_frames_in_other_shapes_it_is_told_at_the_first(small: Mini) -> None:
    """Seven cells where a camera's frames have four."""
    stream = Pipeline(small).stream_session("window:18", window=4)
    wide = torch.zeros(3, 20, 280, dtype=torch.uint8)
    many = small.encoder.count((20, 280), 4)
    assert many > 18
    with pytest.raises(InputError, match=f"^stream: {many} tokens come at one time, and 18 are held; .*: window=[23]$"):
        stream.push(wide, 0.0)
    assert stream.frames == 0 and shown(stream, frames_of(4)).held == 17


def test_what_does_not_fit_is_told_and_leaves_no_trace(pipe: Pipeline) -> None:
    frames = frames_of(8, seed=6)
    stream = shown(pipe.stream_session("window:64", window=4), frames[:3])
    with pytest.raises(InputError, match="finite, rising"):
        stream.push(frames[3], 2.0)
    assert stream.frames == 3
    stream = shown(pipe.stream_session("window:64", window=4), frames)
    before = stream.cache.view(0).keys.clone()
    with pytest.raises(InputError, match="the model holds 512"):
        stream.ask("What?", max_tokens=500)
    for text in ("", " \n", "word " * 80):
        with pytest.raises(InputError):
            stream.say(text)
    assert torch.equal(stream.cache.view(0).keys, before)
    stream = shown(pipe.stream_session("window:64", window=4), frames[:6])
    before = stream.cache.view(0).keys.clone()
    with pytest.raises(InputError):
        # two frames wait, which would be read in front of it
        stream.say("word " * 80)
    assert torch.equal(stream.cache.view(0).keys, before)


def test_a_stream_in_which_nothing_has_come_answers_nothing(pipe: Pipeline) -> None:
    stream = pipe.stream_session("window:64", window=4)
    with pytest.raises(InputError, match="push a frame or say something") as told:
        stream.ask("What?", max_tokens=1)
    assert told.value.item == "stream"
    stream.say("A table.")
    assert stream.ask("What?", max_tokens=1).tokens.generated == 1
