"""What the pipeline is given by mistake, on a small random model of real parts: told before any work, and never at the cost of a batch."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
import pytest
import torch

from mmsdk.answer import Answer
from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.errors import BudgetError, InputError, MmsdkError
from mmsdk.generate.config import GenerationConfig
from mmsdk.legibility import LegibilityWarning
from mmsdk.models.mini.family import Mini
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.pipeline import Pipeline
from mmsdk.tokenizer import TextTokenizer
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.types import Image
from mmsdk.vision.vit import ViT, ViTConfig
from mmsdk.weights.gguf_file import read_file
from mmsdk.weights.gguf_tokenizer import tokenizer_of

CONTEXT = 512


@pytest.fixture(scope="module")
def pipe(mini_language: Path) -> Pipeline:
    torch.manual_seed(0)
    vit = ViT(ViTConfig(width=32, layers=4, heads=2, hidden=64, grid=4)).eval().requires_grad_(False)
    sizes = {"width": 48, "layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 12, "inner": 96, "context": CONTEXT}
    decoder = Decoder(DecoderConfig(vocabulary=49152, **sizes)).eval().requires_grad_(False)
    torch.nn.init.normal_(decoder.embedding.weight)
    torch.nn.init.normal_(decoder.head.weight, std=0.5)
    projector = Projector(ProjectorConfig(vision=32, hidden=32, language=48)).eval().requires_grad_(False)
    tokenizer = tokenizer_of(read_file(mini_language).metadata)
    assert isinstance(tokenizer, TextTokenizer)
    return Pipeline(Mini("small", Encoder(Dinov2(vit), Preprocess(area=16)), projector, decoder, tokenizer, context=CONTEXT))


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of types at every call, as users run it."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def picture(seed: int) -> Image:
    generator = torch.Generator().manual_seed(seed)
    return Image(torch.randint(0, 256, (3, 56, 56), dtype=torch.uint8, generator=generator), f"picture {seed}")


def page() -> Image:
    drawn = PIL.Image.new("RGB", (448, 448), "white")
    pen, font = PIL.ImageDraw.Draw(drawn), PIL.ImageFont.load_default(size=11)
    for top in range(8, 430, 16):
        pen.text((8, top), "all rights reserved; no part of this page may be read without enough tokens " * 2, font=font, fill="black")
    return Image(torch.from_numpy(np.array(drawn)).permute(2, 0, 1), "page.png")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("media", [["a.jpg", "b.jpg"], ("photo.jpg", "What?"), [picture(0)], [None], [5], [{"image": "a.jpg"}]])
def test_a_list_without_a_pair_is_one_error_that_says_how_both_are_written(pipe: Pipeline, media: list[object]) -> None:
    with pytest.raises(InputError) as caught:
        pipe(media)  # type: ignore[call-overload]  # the mistake under test
    assert caught.value.item == "question" and len(str(caught.value)) < 200
    assert '(["a.jpg", "b.jpg"], "Which' in str(caught.value) and '([("a.jpg", "What' in str(caught.value)


@pytest.mark.usefixtures("unchecked")
def test_a_list_with_a_pair_is_a_batch_and_each_mistake_its_own(pipe: Pipeline) -> None:
    found = pipe([(picture(0), "What?"), "a.jpg", 10**5000, (None, "What?"), ([None], "What?"), ({}, "What?")], max_tokens=2)
    assert isinstance(found[0], Answer)
    for index, told in ((1, "expected a pair"), (2, "expected a pair"), (3, "write \\[] in its place"), (4, "NoneType"), (5, "dict")):
        error = found[index]
        assert isinstance(error, InputError) and error.index == index and error.item
        with pytest.raises(InputError, match=told):
            raise error
    assert pipe([], max_tokens=2) == []
    assert len(pipe(((picture(0), "What?"), [picture(1), "Why?"]), max_tokens=2)) == 2


SETTINGS: list[tuple[str, object]] = [
    *(("max_tokens", value) for value in (2**62, 10**5000, CONTEXT, 0, -1, 2.5, math.nan, math.inf, None, "9", True, [5])),
    *(("seed", value) for value in (-1, 2**63, 10**5000, 1.5, math.nan, None, "7", [7])),
    *(("temperature", value) for value in (math.nan, math.inf, -math.inf, -0.1, None, "hot", [1.0], 1j, torch.tensor(1.0))),
    *(("top_k", value) for value in (-1, 2**63, 1.5, None, "5")),
    *((name, value) for name in ("top_p", "min_p") for value in (math.nan, -0.1, 1.5, 10**5000, None, "1")),
    *(("stop", value) for value in ("", {"a"}, (1,), [""], ("",), ("a", None), 5, b"a", ((),), (10**5000,), "\ud800", ["ok", "a\udfff"])),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "value"), SETTINGS, ids=lambda part: type(part).__name__)
def test_settings_that_cannot_be_are_refused_before_anything_is_read(pipe: Pipeline, name: str, value: object) -> None:
    """The picture is missing, and nobody finds out."""
    calls: list[Callable[[], object]] = [
        lambda: pipe("missing.png", "What?", **{name: value}),  # type: ignore[call-overload]  # the mistake under test
        lambda: pipe([("missing.png", "What?")], **{name: value}),  # type: ignore[call-overload]  # the mistake under test
        lambda: pipe.stream("missing.png", "What?", **{name: value}),  # type: ignore[arg-type]  # the mistake under test
    ]
    for call in calls:
        with pytest.raises(InputError, match=f"^{name}: ") as caught:
            call()
        assert len(str(caught.value)) < 200


@pytest.mark.usefixtures("unchecked")
def test_a_stop_may_stand_alone_as_in_openais_api(pipe: Pipeline) -> None:
    """One string, a list, a tuple, nothing; settings of a chat, which are values, tell how a tuple is written."""
    whole = pipe(picture(0), "What?", max_tokens=8)
    for stop in (whole[3:5], [whole[3:5]], (whole[3:5],)):
        assert pipe(picture(0), "What?", max_tokens=8, stop=stop) == whole[: whole.index(whole[3:5])]
        assert "".join(pipe.stream(picture(0), "What?", max_tokens=8, stop=stop)) == whole[: whole.index(whole[3:5])]
    with pytest.raises(InputError, match=r"^stop: 'star' is not a tuple of strings; write stop=\("):
        GenerationConfig(stop="star")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(InputError, match=r'^stop: 5 is not a string, or a list or tuple of strings.*write stop="'):
        pipe(picture(0), "What?", stop=5)  # type: ignore[call-overload]  # the mistake under test


WRONG: list[tuple[str, Callable[[Pipeline], object]]] = [
    ("^adapter: 5 names no adapter", lambda pipe: pipe([], "What?", adapter=5)),  # type: ignore[call-overload]
    ("^adapter: 5 names no adapter", lambda pipe: pipe.merge(5)),  # type: ignore[arg-type]
    ("^adapter: 5 names no adapter", lambda pipe: pipe.encode(picture(0), [5, 6])),  # type: ignore[arg-type]
    ("^adapter: 5 is no place of an adapter", lambda pipe: pipe.load_adapter(5, "a")),  # type: ignore[arg-type]
    ("^adapter: '' is no place of an adapter", lambda pipe: pipe.load_adapter("", "a")),
    ("5 names no method", lambda pipe: pipe([], "What?", compress=5)),  # type: ignore[call-overload]
    ("^kv: 7 names no memory; write a policy", lambda pipe: pipe.stream_session(7)),  # type: ignore[arg-type]
    ("bounds no stream; did you mean 'streaming'", lambda pipe: pipe.stream_session("streamin:64")),
    ("^system: it is int, expected a string", lambda pipe: pipe.chat(5)),  # type: ignore[arg-type]
    ("^system: holds .*which is no letter", lambda pipe: pipe.chat("caf\udce9")),
    ("^config: it is 5, expected settings", lambda pipe: pipe.chat("", 5)),  # type: ignore[arg-type]
    ("^config: it is 5, expected settings", lambda pipe: pipe.chat()("What?", config=5)),  # type: ignore[call-overload]
    ("^question: it is int, expected a string", lambda pipe: pipe.chat()([], 5)),  # type: ignore[call-overload]
    ("^turn: nothing was asked yet", lambda pipe: pipe.chat().undo()),
    ("^turn: nothing was asked yet", lambda pipe: pipe.chat().drop("last")),  # type: ignore[arg-type]
    ("^text: it is int, expected a string", lambda pipe: pipe.stream_session("streaming:64").say(5)),  # type: ignore[arg-type]
    ("^text: it is empty", lambda pipe: pipe.stream_session("streaming:64").say(" ")),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("told", "wrong"), WRONG, ids=lambda part: part if isinstance(part, str) else "")
def test_what_is_of_another_kind_is_told_by_the_name_of_its_argument(
    pipe: Pipeline, told: str, wrong: Callable[[Pipeline], object]
) -> None:
    with pytest.raises(MmsdkError, match=told):
        wrong(pipe)


def test_a_budget_that_does_not_fit_names_the_input(pipe: Pipeline) -> None:
    """PP-09: of several with one name, by its number, too; whether it is met inside the encoder, behind it or in the decoder."""
    square, narrow = picture(0), Image(picture(1).pixels[:, :28], "b.png")
    for method in ("uniform", "tome", "fastv"):
        with pytest.raises(BudgetError, match=r"^b\.png: budget 16 tokens is outside \[1, 15\]"):
            pipe([square, narrow], "Which?", compress=f"{method}:16", max_tokens=1)
        with pytest.raises(BudgetError, match=r"^tensor \(2 of 2\): budget 16 tokens"):
            pipe([square.pixels, narrow.pixels], "Which?", compress=f"{method}:16", max_tokens=1)
        found = pipe([(narrow, "What?"), (square, "What?")], compress=f"{method}:16", max_tokens=1)
        assert isinstance(found[0], BudgetError) and (found[0].item, found[0].index) == ("b.png", 0) and isinstance(found[1], Answer)


@pytest.mark.parametrize("temperature", [1e-320, 1e308])
def test_the_smallest_and_the_largest_temperature_work(pipe: Pipeline, temperature: float) -> None:
    coldest = pipe(picture(0), "What?", max_tokens=4, temperature=temperature)
    assert coldest.tokens.generated > 0 and (temperature > 1 or coldest == pipe(picture(0), "What?", max_tokens=4))


@pytest.mark.parametrize("compress", ["tome:2", ["tome:4", "fastv:0.5"]], ids=str)
def test_where_warnings_are_errors_a_starved_page_fails_alone(pipe: Pipeline, compress: str | list[str]) -> None:
    """PP-13: the row that would have been warned of carries the error; the others are answered as they would be."""
    items = [(picture(0), "What is it?"), (page(), "What does it say?"), (picture(1), "Which?"), ("missing.png", "What?")]
    with pytest.warns(LegibilityWarning, match=r"page\.png: this picture is full of writing"):
        usual = pipe(items, max_tokens=4, compress=compress)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pipe(items, max_tokens=4, compress=compress)
        (alone,) = pipe(items[1:2], max_tokens=4, compress=compress)
        for ask in (pipe, pipe.stream):
            with pytest.raises(InputError, match=r"^page\.png: this picture is full of writing"):
                ask(*items[1], max_tokens=4, compress=compress)
    assert isinstance(usual[1], Answer) and usual[1].tokens.kept == 2
    for index in (0, 2):
        ours, theirs = found[index], usual[index]
        assert isinstance(ours, Answer) and isinstance(theirs, Answer) and ours == theirs and ours.tokens == theirs.tokens
    for error, index in ((found[1], 1), (alone, 0)):
        assert isinstance(error, InputError) and (error.index, error.item) == (index, "page.png") and "keep more" in str(error)
    assert isinstance(found[3], InputError) and "no such file" in str(found[3])


@pytest.mark.parametrize(
    "content", ["What?", [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "What?"}]], ids=["words", "parts"]
)
def test_chat_messages_are_told_the_form_that_is_taken(pipe: Pipeline, content: object, monkeypatch: pytest.MonkeyPatch) -> None:
    # without the check of types at every call, as users run it
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    message: Any = {"role": "user", "content": content}
    told = r"^messages: chat messages are not taken in this form; write pipe\(\"photo.jpg\", .*pipe.chat\(.*`mmsdk serve`"
    for asked in (message, [message], [{"role": "system", "content": "Be brief."}, message]):
        with pytest.raises(InputError, match=told):
            pipe(asked)
    for call in (
        lambda: pipe.chat()(message),
        lambda: pipe.chat()([message]),
        lambda: pipe([message], "What?"),
        lambda: pipe.stream([message], "?"),
        lambda: pipe.stream([message]),
        lambda: pipe.stream(message),
    ):
        with pytest.raises(InputError, match=told):
            call()
    for row in pipe([[message], [message, message]]):
        assert isinstance(row, InputError) and row.item == "messages" and row.index is not None
