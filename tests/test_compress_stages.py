"""Compression at all three stages of a pipeline of real parts, small ones: exact, the same alone and together, told in one audit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from mmsdk import plugins
from mmsdk.answer import Answer
from mmsdk.compress import Step, compression
from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.errors import BudgetError, InputError, ModelError, PluginError
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.policy_memory import POLICIES
from mmsdk.models.mini.family import Mini
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.pipeline import Pipeline
from mmsdk.recall import recalling
from mmsdk.stages import Clock, prepare
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.methods.cdpruner import CDPruner
from mmsdk.tokencomp.methods.fastv import FastV
from mmsdk.tokencomp.methods.p4q import P4Q
from mmsdk.tokencomp.methods.random import Random
from mmsdk.tokencomp.methods.tome import ToMe
from mmsdk.tokencomp.types import Compressed, Side
from mmsdk.tokenizer import TextTokenizer
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.types import Image, Media, Video, VisualTokens
from mmsdk.vision.vit import ViT, ViTConfig
from mmsdk.weights.gguf_file import read_file
from mmsdk.weights.gguf_tokenizer import tokenizer_of

ALL = ["tome:0.5", "uniform:0.5", "fastv:0.5"]
SPECS: list[str | list[str]] = [
    "tome:0.5",
    "fastv:0.25",
    "pyramiddrop:0.25",
    "deft:0.25",
    ALL,
    ["tome:0.75", "deft:0.3"],
    ["random:0.5", "pyramiddrop:0.5"],
    "cdpruner:0.4",
    ["uniform:0.75", "cdpruner:0.5,sign=positive", "deft:0.5"],
]


def picture(seed: int, height: int = 56, width: int = 56) -> Image:
    generator = torch.Generator().manual_seed(seed)
    return Image(torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator), f"picture {seed}")


def clip(seed: int, frames: int = 4) -> Video:
    generator = torch.Generator().manual_seed(seed)
    return Video(
        torch.randint(0, 256, (frames, 3, 56, 56), dtype=torch.uint8, generator=generator), torch.arange(frames) * 0.5, f"clip {seed}"
    )


ITEMS: list[tuple[Media | list[Media], str]] = [
    ([], "What is two and two?"),
    (picture(0), "What is it?"),
    ([picture(1), picture(2, 28, 84), picture(3, 84, 28)], "Which of them is the larger one, and why do you think so?"),
    (clip(4), "What happens?"),
    ([picture(5, 14, 28), clip(6), picture(7)], "Which?"),
]


@pytest.fixture(scope="module")
def pipe(mini_language: Path) -> Pipeline:
    torch.manual_seed(0)
    vit = ViT(ViTConfig(width=32, layers=3, heads=2, hidden=64, grid=4)).eval().requires_grad_(False)
    sizes = {"width": 48, "layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 12, "inner": 96, "context": 512}
    decoder = Decoder(DecoderConfig(vocabulary=49152, **sizes)).eval().requires_grad_(False)
    torch.nn.init.normal_(decoder.embedding.weight)
    torch.nn.init.normal_(decoder.head.weight, std=0.5)
    projector = Projector(ProjectorConfig(vision=32, hidden=32, language=48)).eval().requires_grad_(False)
    tokenizer = tokenizer_of(read_file(mini_language).metadata)
    assert isinstance(tokenizer, TextTokenizer)
    return Pipeline(Mini("small", Encoder(Dinov2(vit), Preprocess(area=16)), projector, decoder, tokenizer, context=512))


def test_three_stages_of_one_picture(pipe: Pipeline) -> None:
    answer = pipe(picture(0), "What is it?", max_tokens=4, compress=ALL)
    words = len(pipe.vlm.tokenizer.encode("Question: What is it?\nAnswer:"))
    assert (answer.tokens.visual, answer.tokens.kept, answer.tokens.prompt) == (16, 2, 1 + 4 + words)
    (sight,) = answer.sights
    assert sight.audit.method == "tome+uniform+fastv" and sight.grid == (1, 4, 4) and len(sight.saliency) == 16
    assert sight.audit.assignment.shape == (16,) and set(sight.audit.assignment.tolist()) == {-1, 0, 1}


def test_three_stages_of_a_clip_are_told_by_its_patches(pipe: Pipeline) -> None:
    """Four frames of 4 x 4 patches, which pooling makes 16 tokens: half are merged from the patches, half kept, half go on."""
    answer = pipe(clip(4), "What happens?", max_tokens=2, compress=ALL)
    assert (answer.tokens.visual, answer.tokens.kept) == (16, 2)
    (sight,) = answer.sights
    assert sight.grid == (4, 4, 4) and sight.positions.shape == (64, 3) and set(sight.audit.assignment.tolist()) == {-1, 0, 1}


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_mixed_batch_equals_its_rows_alone_and_again(pipe: Pipeline, spec: str | list[str]) -> None:
    """PP-08, PP-12: with the cache on, whatever shares the batch, at each repetition."""
    together = pipe(ITEMS, max_tokens=8, compress=spec)
    assert len({str(answer) for answer in together}) > 2
    for (media, question), answer, again in zip(ITEMS, together, pipe(ITEMS, max_tokens=8, compress=spec), strict=True):
        alone = pipe(media, question, max_tokens=8, compress=spec)
        assert isinstance(answer, Answer) and answer == again == alone and answer.tokens == alone.tokens
        for one, other in zip(answer.audit, alone.audit, strict=True):
            assert torch.equal(one.assignment, other.assignment) and one.method == other.method
    assert pipe.stream(ITEMS[3][0], ITEMS[3][1], max_tokens=8, compress=spec).answer == together[3]


@pytest.mark.parametrize(
    ("spec", "kept", "entering"), [("fastv:0.25", 4, 16), ("pyramiddrop:3", 3, 16), ("deft:0.25", 4, 7), ("deft:4,reserve=0.0", 4, 4)]
)
def test_each_input_meets_the_budget_and_the_prompt_is_what_entered(pipe: Pipeline, spec: str, kept: int, entering: int) -> None:
    full = pipe([picture(1), picture(2)], "Which?", max_tokens=3)
    thin = pipe([picture(1), picture(2)], "Which?", max_tokens=3, compress=spec)
    assert thin.tokens.kept == 2 * kept and full.tokens.prompt - thin.tokens.prompt == 2 * (16 - entering)
    for audit in thin.audit:
        assert audit.assignment[audit.assignment >= 0].tolist() == list(range(kept)) and audit.method == spec.partition(":")[0]
        assert audit.scores.shape == (16,) and audit.scores.min() >= 0 and audit.scores.max() > 0 and audit.seconds >= 0
        if spec.startswith("fastv"):
            best = audit.scores.argsort(descending=True, stable=True)[:kept].sort().values
            assert torch.equal((audit.assignment >= 0).nonzero()[:, 0], best)


@pytest.mark.parametrize("spec", ["fastv:0.25", "deft:0.25", "divprune:0.25"])
def test_the_seconds_of_an_audit_are_the_inputs_own_share(pipe: Pipeline, spec: str) -> None:
    """Six inputs of four rows, selected from together: what they took adds up to no more than the stages that it was part of."""
    answers = pipe(
        [(picture(0), "What?"), ([picture(1), picture(2), picture(3)], "Which?"), (picture(4), "What?"), (picture(5), "Who?")],
        max_tokens=1,
        compress=spec,
    )
    audits = [audit for answer in answers if isinstance(answer, Answer) for audit in answer.audit]
    times = answers[0].timings  # type: ignore[union-attr]  # no row fails
    assert len(audits) == 6 and min(audit.seconds for audit in audits) > 0
    assert 1000 * sum(audit.seconds for audit in audits) <= times.compress + times.prefill
    assert spec == "deft:0.25" or len({audit.seconds for audit in audits}) == 1


def test_the_cache_is_really_smaller(pipe: Pipeline) -> None:
    """A batch of four: layers behind the cut hold and reserve the kept tokens alone."""
    items = [([picture(i), picture(i + 9)], "What is it?") for i in range(4)]

    def cache_of(*spec: str) -> DenseCache:
        context = prepare(pipe.vlm, compression(list(spec)), items, 5, Clock(torch.device("cpu"))).context
        assert context is not None and isinstance(context.cache, DenseCache)
        return context.cache

    full, thin = cache_of(), cache_of("fastv:0.25")
    token = 2 * 2 * 12 * 4 * 4
    assert full.nbytes - thin.nbytes == 4 * 24 * token
    lengths = [thin.view(layer).lengths.tolist() for layer in range(6)]
    assert lengths[:2] == [full.view(0).lengths.tolist()] * 2
    assert lengths[2:] == [[length - 24 for length in lengths[0]]] * 4
    assert cache_of(*ALL).nbytes < thin.nbytes


@pytest.mark.parametrize("kv", ["paged", "int8", *(f"{name}:200" for name in plugins.available(POLICIES))])
@pytest.mark.parametrize("spec", ["fastv:0.25", "pyramiddrop:0.25", "deft:0.25"])
def test_every_kind_of_memory_lets_the_decoder_choose_alike(pipe: Pipeline, spec: str, kv: str) -> None:
    """PP-05: also by the keys of a layer that holds nothing yet; all of these memories have room for whole prompts."""
    remembering = replace(pipe, recall=recalling(kv))
    for answer, plain in zip(remembering(ITEMS, max_tokens=1, compress=spec), pipe(ITEMS, max_tokens=1, compress=spec), strict=True):
        assert isinstance(answer, Answer) and isinstance(plain, Answer) and answer.tokens == plain.tokens
        for one, other in zip(answer.audit, plain.audit, strict=True):
            assert torch.equal(one.assignment, other.assignment)


def test_whole_budgets_at_every_stage_are_the_baseline(pipe: Pipeline) -> None:
    """PP-09, for pictures and clips."""
    spec = ["tome:1.0", "uniform:1.0", "fastv:1.0"]
    for answer, plain in zip(pipe(ITEMS, max_tokens=8, compress=spec), pipe(ITEMS, max_tokens=8), strict=True):
        assert isinstance(answer, Answer) and isinstance(plain, Answer) and answer == plain and answer.tokens == plain.tokens


def test_a_row_that_a_stage_cannot_serve_is_that_rows_error(pipe: Pipeline) -> None:
    good, short = pipe([(picture(0), "What?"), (clip(1), "What?")], max_tokens=2, compress="tome:3")
    assert isinstance(good, Answer) and good.tokens.kept == 3 and isinstance(short, BudgetError) and "4 frames" in str(short)
    with pytest.raises(BudgetError, match="9 visual tokens"):
        pipe(picture(0), "What?", compress=["random:9", "fastv:12"])


@dataclass(frozen=True, slots=True)
class Counting:
    """Random, noting how many inputs each call has."""

    side: ClassVar[Side] = "before"
    asks: ClassVar[bool] = False
    calls: list[int]

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[torch.Tensor] | None = None
    ) -> list[Compressed]:
        self.calls.append(len(tokens))
        return Random()(tokens, budgets, query)


@dataclass(frozen=True, slots=True)
class Told:
    """Random behind the projector, noting what each input is and what is asked about it."""

    side: ClassVar[Side] = "behind"
    asks: ClassVar[bool] = True
    heard: list[tuple[torch.Tensor, torch.Tensor]]

    def __call__(
        self, tokens: Sequence[VisualTokens], budgets: Sequence[Budget], query: Sequence[torch.Tensor] | None = None
    ) -> list[Compressed]:
        assert query is not None
        self.heard.extend((item.features, words) for item, words in zip(tokens, query, strict=True))
        return Random()(tokens, budgets)


def test_behind_the_projector_each_input_is_embeddings_with_the_words_of_its_own_question(pipe: Pipeline) -> None:
    told, vlm = Told([]), pipe.vlm
    answers = pipe(ITEMS, max_tokens=8, compress=Step(told, 0.5))
    expected = [(one, question) for media, question in ITEMS for one in (media if isinstance(media, list) else [media])]
    for (one, question), (features, words) in zip(expected, told.heard, strict=True):
        (embeddings,) = vlm.connect(vlm.encoder([one]))
        torch.testing.assert_close(features, embeddings, rtol=1e-4, atol=1e-5)
        assert torch.equal(words, vlm.decoder.embed(torch.tensor([vlm.tokenizer.encode(question)]))[0])
    assert answers == pipe(ITEMS, max_tokens=8, compress="random:0.5")


@pytest.mark.parametrize("method", [CDPruner(), P4Q()])
def test_what_is_kept_depends_on_the_question(pipe: Pipeline, method: CDPruner | P4Q) -> None:
    vlm, found = pipe.vlm, list[list[int]]()
    (tokens,) = vlm.encoder([picture(0)])
    embedded = replace(tokens, features=vlm.connect([tokens])[0])
    for question in ("What is it?", "How many birds?", "Left or right of the red ball?"):
        (sight,) = pipe(picture(0), question, max_tokens=1, compress=Step(method, 5)).sights
        (alone,) = method([embedded], [Budget(5)], [vlm.decoder.embed(torch.tensor([vlm.tokenizer.encode(question)]))[0]])
        assert torch.equal(sight.audit.assignment, alone.audit.assignment)
        found.append(alone.audit.assignment.tolist())
    assert found[0] != found[1] or found[1] != found[2]


def test_rows_are_planned_for_together_and_one_by_one_only_where_one_does_not_fit(pipe: Pipeline) -> None:
    items = [(picture(i), "What?") for i in range(3)] + [([picture(3), clip(4)], "Which?")]
    counting = Counting([])
    together = pipe(items, max_tokens=4, compress=Step(counting, 15))
    assert counting.calls == [5]
    assert [answer for answer in together if isinstance(answer, Answer)] == [
        pipe(*item, max_tokens=4, compress="random:15") for item in items
    ]
    counting.calls.clear()
    *good, unfit = pipe([*items, (picture(5, 28, 84), "What?")], max_tokens=4, compress=Step(counting, 15))
    assert isinstance(unfit, BudgetError) and unfit.index == 4 and good == together
    # input by input, so that an error says which of a row's it is about
    assert counting.calls[-5:] == [1, 1, 1, 1, 1]


def test_steps_out_of_order_or_doubled_are_refused() -> None:
    with pytest.raises(PluginError, match="encoder, then features, then projector, then decoder"):
        compression(["uniform:0.5", "tome:0.5"])
    with pytest.raises(PluginError, match="encoder, then features, then projector, then decoder"):
        compression([Step(FastV(), 0.5), Step(Random(), 0.5)])
    with pytest.raises(PluginError, match="inside the decoder"):
        compression(["fastv:0.5", "deft:0.5"])
    with pytest.raises(PluginError, match="inside the encoder"):
        compression([Step(ToMe(), 0.5), Step(ToMe(), 0.5)])
    with pytest.raises(BudgetError, match="fastv:64"):
        compression("fastv")


def test_a_decoder_with_too_few_layers_is_named(pipe: Pipeline) -> None:
    with pytest.raises(ModelError, match="fastv drops tokens after layer 6"):
        pipe(picture(0), "What?", compress="fastv:0.5,layer=6")
    with pytest.raises(ModelError, match="8 stages"):
        pipe(picture(0), "What?", compress="pyramiddrop:0.5,stages=8")


@dataclass(frozen=True, slots=True)
class Closed:
    """A `VisionEncoder` that lets nobody inside."""

    inner: Encoder

    @property
    def width(self) -> int:
        return self.inner.width

    def count(self, size: tuple[int, int], frames: int = 1) -> int:
        return self.inner.count(size, frames)

    def __call__(self, media: Sequence[Media]) -> list[VisualTokens]:
        return self.inner(media)


def test_an_encoder_that_cannot_be_shortened_is_named(pipe: Pipeline) -> None:
    parts = {name: getattr(pipe.vlm, name) for name in ("name", "decoder", "tokenizer", "stop_ids", "context", "connect", "layout")}
    assert isinstance(pipe.vlm, Mini)
    closed = Pipeline(SimpleNamespace(encoder=Closed(pipe.vlm.encoder), **parts))  # type: ignore[arg-type]  # it is a VLM by its parts
    assert closed(picture(0), "What?", max_tokens=3, compress="uniform:4") == pipe(picture(0), "What?", max_tokens=3, compress="uniform:4")
    with pytest.raises(ModelError, match="tome works inside the encoder"):
        closed(picture(0), "What?", compress="tome:0.5")


@pytest.mark.parametrize("spec", ["tome:0.5", "uniform:0.5"])
def test_a_picture_that_the_encoder_cannot_take_is_its_own_row_alone(small: Mini, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found when it is resized, in the midst of a batch."""
    resized = Preprocess.__call__

    def refusing(self: Preprocess, frames: torch.Tensor) -> torch.Tensor:
        if (frames == 77).all():
            raise InputError("too long for its width")
        return resized(self, frames)

    monkeypatch.setattr(Preprocess, "__call__", refusing)
    wrong = Image(torch.full((3, 56, 56), 77, dtype=torch.uint8), "wrong.png")
    pipe = Pipeline(small, compression(spec))
    rows = [(picture(0), "What is it?"), ([picture(1), wrong], "Which?"), (picture(2), "And?")]
    answers = pipe(rows, max_tokens=3)
    assert isinstance(answers[1], InputError) and answers[1].item == "wrong.png"
    assert [answers[0].ids, answers[2].ids] == [pipe(*rows[place], max_tokens=3).ids for place in (0, 2)]
