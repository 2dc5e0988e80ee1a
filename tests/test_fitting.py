"""Targets in a pipeline of real parts, small ones, on a machine that is said to read one token a millisecond."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mmsdk.answer import Answer
from mmsdk.apps.train_dora.loop import export
from mmsdk.compress import compression
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import BudgetError, InputError
from mmsdk.fitting import lengths
from mmsdk.kv.memory import memory_of
from mmsdk.latency import latency_file, latency_of
from mmsdk.models.mini.family import Mini
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.pipeline import Pipeline
from mmsdk.recall import recalling
from mmsdk.stages import Clock, prepare
from mmsdk.tokencomp.actor import Actor, ActorConfig
from mmsdk.tokenizer import TextTokenizer
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.types import Image, Video
from mmsdk.vision.vit import ViT, ViTConfig
from mmsdk.weights.gguf_file import read_file
from mmsdk.weights.gguf_tokenizer import tokenizer_of


@pytest.fixture(scope="module")
def pipe(mini_language: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """Its machine's speed is what the file that measuring leaves is made to tell."""
    torch.manual_seed(0)
    vit = ViT(ViTConfig(width=32, layers=3, heads=2, hidden=64, grid=4)).eval().requires_grad_(False)
    sizes = {"width": 48, "layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 12, "inner": 96, "context": 512}
    decoder = Decoder(DecoderConfig(vocabulary=49152, **sizes)).eval().requires_grad_(False)
    torch.nn.init.normal_(decoder.embedding.weight)
    projector = Projector(ProjectorConfig(vision=32, hidden=32, language=48)).eval().requires_grad_(False)
    tokenizer = tokenizer_of(read_file(mini_language).metadata)
    assert isinstance(tokenizer, TextTokenizer)
    small = Pipeline(Mini("small", Encoder(Dinov2(vit), Preprocess(area=16)), projector, decoder, tokenizer, context=512))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMSDK_CACHE", str(tmp_path_factory.mktemp("cache")))
        latency_of(small.vlm)
        file = latency_file(small.vlm)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"lengths": [1, 1000], "ms": [1.0, 1000.0]}))
        yield small


def picture(seed: int, height: int = 56, width: int = 56) -> Image:
    generator = torch.Generator().manual_seed(seed)
    return Image(torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator), f"picture {seed}")


def clip(seed: int) -> Video:
    return Video(picture(seed).pixels.repeat(4, 1, 1, 1), torch.arange(4.0), f"clip {seed}")


def words(pipe: Pipeline, question: str) -> int:
    return 1 + len(pipe.vlm.tokenizer.encode(f"Question: {question}\nAnswer:"))


@pytest.mark.parametrize("method", ["uniform", "simplecluster", "tome", "random"])
def test_the_prompt_is_as_long_as_the_time_allows(pipe: Pipeline, method: str) -> None:
    least = words(pipe, "What is it?")
    for room in (2, 5, 9, 16, 100):
        answer = pipe(picture(0), "What is it?", max_tokens=2, compress=f"{method}:auto@prefill<{least + room}ms")
        assert answer.tokens.kept == min(room, 16) and answer.tokens.prompt == least + min(room, 16)


@pytest.mark.parametrize("kv", ["paged", "int8"])
def test_the_time_is_that_of_the_memory_that_is_asked_for(pipe: Pipeline, kv: str) -> None:
    """Which is said to take twice as long as the dense one."""
    slower = Pipeline(pipe.vlm, recall=recalling(kv))
    latency_of(pipe.vlm, memory_of(kv))
    file = latency_file(pipe.vlm, memory_of(kv))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lengths": [1, 1000], "ms": [2.0, 2000.0]}))
    least = words(pipe, "What is it?")
    for room in (2, 9):
        spec = f"uniform:auto@prefill<{2 * (least + room)}ms"
        assert slower(picture(0), "What is it?", max_tokens=2, compress=spec).tokens.kept == room
        assert pipe(picture(0), "What is it?", max_tokens=2, compress=spec).tokens.kept == min(16, least + 2 * room)


def test_what_cannot_be_had_is_told(pipe: Pipeline) -> None:
    least = words(pipe, "What is it?")
    with pytest.raises(BudgetError, match=rf"prefill<{least}ms cannot be met: the {least} tokens of words .* about {least + 1} ms"):
        pipe(picture(0), "What is it?", compress=f"uniform:auto@prefill<{least}ms")


def test_a_question_without_sight_has_nothing_to_fit(pipe: Pipeline) -> None:
    assert pipe([], "What is it?", max_tokens=3, compress="uniform:auto@prefill<1ms") == pipe([], "What is it?", max_tokens=3)


def test_rows_of_a_batch_are_fitted_as_they_would_be_alone(pipe: Pipeline) -> None:
    long = "Which of them is the larger one, and why do you think that it is so very much larger?"
    items = [(picture(0), "What?"), ([picture(1), clip(2)], "What?"), (picture(3), long), ([], "Why?"), (clip(4), "What is it?")]
    spec = f"uniform:auto@prefill<{words(pipe, 'What is it?') + 6}ms"
    together = pipe(items, max_tokens=4, compress=spec)
    assert isinstance(together[2], BudgetError) and together[2].index == 2
    for (media, question), answer in zip(items, together, strict=True):
        if question != long:
            alone = pipe(media, question, max_tokens=4, compress=spec)
            assert isinstance(answer, Answer) and answer == alone and answer.tokens == alone.tokens
    assert pipe.stream(*items[0], max_tokens=4, compress=spec).answer == together[0]


def test_inputs_of_different_sizes_keep_one_share(pipe: Pipeline) -> None:
    """A picture of 16 tokens and one of 12; of both at most 14 have room."""
    media, least = [picture(0), picture(1, 28, 84)], words(pipe, "Which?")
    full = [pipe.vlm.encoder.count(item.size) for item in media]
    answer = pipe(media, "Which?", max_tokens=2, compress=f"uniform:auto@prefill<{least + 14}ms")
    kept = [int(audit.assignment.max()) + 1 for audit in answer.audit]
    assert full == [16, 12] and kept == [8, 6]


SPECS: list[list[str]] = [
    ["random:0.5", "uniform:{}"],
    ["uniform:{}", "fastv:0.5"],
    ["tome:0.75", "fastv:{}"],
    ["deft:{}"],
    ["pyramiddrop:{}"],
    ["uniform:{}", "fastv:3"],
]


@pytest.mark.parametrize("steps", SPECS, ids=str)
def test_the_budget_of_a_chain_is_the_largest_that_fits(pipe: Pipeline, steps: list[str]) -> None:
    """Each layer is counted with the tokens that it sees: with one token more the mean over the layers would be beyond the target."""
    depth, least = 6, words(pipe, "What is it?")
    for room in (6, 8, 10):
        spec = [step.format(f"auto@prefill<{least + room}ms") for step in steps]
        found = [pipe(picture(0), "What is it?", max_tokens=2, compress=spec)]
        fitting = []
        for count in range(1, 17):
            try:
                seen = lengths(compression([step.format(count) for step in steps]), [16], least, depth)
            except BudgetError:
                continue
            fitting += [count] if sum(seen) / depth <= least + room else []
        chosen = pipe(picture(0), "What is it?", max_tokens=2, compress=[step.format(max(fitting)) for step in steps])
        assert found[0].tokens == chosen.tokens and torch.equal(found[0].audit[0].assignment, chosen.audit[0].assignment)


@pytest.mark.parametrize("spec", [["uniform:0.5"], ["tome:0.5", "fastv:0.5"], ["deft:0.25"], ["random:8", "pyramiddrop:0.25"]], ids=str)
def test_lengths_foretold_are_those_of_the_cache(pipe: Pipeline, spec: list[str]) -> None:
    media = [picture(0), picture(1, 28, 84)]
    context = prepare(pipe.vlm, compression(spec), [(media, "Which?")], 3, Clock(torch.device("cpu"))).context
    assert context is not None
    held = [int(context.cache.view(layer).lengths[0]) for layer in range(6)]
    assert lengths(compression(spec), [16, 12], words(pipe, "Which?"), 6) == held


def test_the_smallest_input_has_what_a_later_step_wants(pipe: Pipeline) -> None:
    """Of 16 tokens and 12 a later step wants 6 each: 8 of the larger one at least, since the smaller keeps the same share."""
    media, least = [picture(0), picture(1, 28, 84)], words(pipe, "Which?")
    for room in (30, 100):
        answer = pipe(media, "Which?", max_tokens=2, compress=[f"uniform:auto@prefill<{least + room}ms", "fastv:6"])
        assert answer.tokens.kept == 12
    with pytest.raises(BudgetError, match="cannot be met"):
        pipe(media, "Which?", compress=[f"uniform:auto@prefill<{least + 3}ms", "fastv:6"])


@pytest.mark.parametrize("method", ["tome", "uniform"])
def test_what_a_method_cannot_keep_is_not_chosen(pipe: Pipeline, method: str) -> None:
    """Inside the encoder each of 4 frames keeps a token, so that room for 2 is too little, and is told as such."""
    least, frames = words(pipe, "What?"), clip(1)
    assert pipe(frames, "What?", max_tokens=2, compress=f"{method}:auto@prefill<{least + 9}ms").tokens.kept in (8, 9)
    if method == "tome":
        with pytest.raises(BudgetError, match=rf"prefill<{least + 2}ms cannot be met"):
            pipe(frames, "What?", compress=f"tome:auto@prefill<{least + 2}ms")


@pytest.fixture(scope="module")
def dora(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An actor of random weights for the encoder above, as a knob."""
    torch.manual_seed(1)
    actor, path = Actor(ActorConfig(32, 3, hidden=16, eligible=(1, 2))), tmp_path_factory.mktemp("actor") / "actor.safetensors"
    export(path, actor, "a test")
    return f"actor={path},least=2"


def test_an_actor_is_fitted_to_a_time_as_every_count_is(pipe: Pipeline, dora: str) -> None:
    """Pictures and frames of clips, in a batch as alone; all of its tokens where there is time for them."""
    least, question = words(pipe, "What is it?"), "What is it?"
    for room in (2, 5, 9, 16, 100):
        spec = f"dora:auto@prefill<{least + room}ms,{dora}"
        together = pipe([(picture(0), question), (clip(1), question)], max_tokens=2, compress=spec)
        assert isinstance(together[0], Answer) and together[0] == pipe(picture(0), question, max_tokens=2, compress=spec)
        assert together[0].tokens.kept == min(room, 16) and together[0].tokens.prompt == least + min(room, 16)
        if room < 4:
            assert isinstance(together[1], BudgetError) and f"prefill<{least + room}ms cannot be met" in str(together[1])
        else:
            assert isinstance(together[1], Answer) and together[1].tokens.kept == min(room, 16)


@pytest.mark.parametrize("method", ["tome", "dora"])
def test_a_time_and_a_clip_that_has_a_frame_for_each_token(pipe: Pipeline, dora: str, method: str) -> None:
    """Of four frames each keeps a token, so that four are the fewest, and what the time is told to be too short for."""
    least, knob = words(pipe, "What?"), f",{dora}" if method == "dora" else ""
    assert pipe(clip(1), "What?", max_tokens=2, compress=f"{method}:auto@prefill<{least + 100}ms{knob}").tokens.kept == 16
    with pytest.raises(BudgetError, match=rf"take about {least + (4 if method == 'dora' else 8)} ms"):
        pipe(clip(1), "What?", compress=f"{method}:auto@prefill<{least + 3}ms{knob}")


@pytest.mark.parametrize("method", ["tome", "dora"])
def test_no_time_lets_a_method_inside_the_encoder_work_on_what_was_encoded(pipe: Pipeline, dora: str, method: str) -> None:
    knob, question = f",{dora}" if method == "dora" else "", "What is it?"
    spec = f"{method}:auto@prefill<{words(pipe, question) + 5}ms{knob}"
    before, after = pipe([(pipe.encode(picture(0)), question), (picture(1), question)], max_tokens=1, compress=spec)
    assert isinstance(before, InputError) and f"{method} works inside the encoder, and this was encoded before" in str(before)
    assert isinstance(after, Answer) and after.tokens.kept == 5


@pytest.mark.parametrize("knobs", ["coder=mini", "span=frame", "basis=pca"])
def test_a_coder_that_does_not_take_any_count_is_fitted_to_no_time(knobs: str) -> None:
    with pytest.raises(InputError, match="does not take any count"):
        compression(f"braco:auto@prefill<80ms,{knobs}")
