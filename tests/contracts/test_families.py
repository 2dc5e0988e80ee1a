"""Every compressor and every kind of memory on every family of models: exact counts, the same answer alone and among others.

Tiny checkpoints that transformers wrote stand for the families. `REFUSED` holds every pair of a family and a method that does not work.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mmsdk import plugins
from mmsdk.answer import Answer
from mmsdk.apps.checkpoints.seeing import WRITERS
from mmsdk.compress import METHODS
from mmsdk.encoded import Encoded
from mmsdk.errors import MmsdkError, ModelError
from mmsdk.families import open_model
from mmsdk.kv.memory import KINDS as CACHES
from mmsdk.kv.policy import Evictor, Reader
from mmsdk.kv.policy_memory import POLICIES
from mmsdk.pipeline import Pipeline
from mmsdk.recall import recalling
from mmsdk.stages import Question
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.methods.tome import ToMe
from mmsdk.vision.shorten import ShorteningEncoder
from mmsdk.vision.types import Image, Video

QUESTION = "What is left of the ball?"
HOW: dict[str, Any] = {"compress": "uniform:0.5", "max_tokens": 2}
NAMES = plugins.available(POLICIES)


@pytest.fixture(scope="module", params=list(WRITERS))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def pipe(family: str, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = tmp_path_factory.mktemp(family)
    WRITERS[family](folder)
    return Pipeline(open_model(str(folder), torch.float32, torch.device("cpu")))


def picture(height: int, width: int, shade: int) -> Image:
    """A soft picture without anything that looks like writing."""
    rows, columns = torch.linspace(0, 120, height)[:, None].expand(-1, width), torch.linspace(0, 90, width).expand(height, -1)
    return Image(torch.stack((rows + columns, rows + shade, columns + shade)).to(torch.uint8), f"picture {shade}")


MEDIA = [picture(60, 50, 10), picture(24, 90, 60)]
CLIP = Video(torch.stack([picture(32, 40, 20 * step).pixels for step in range(4)]), torch.arange(4) / 2)


# An actor is trained for one vision transformer, the default model's: for any other it says how to train one, or to choose another method.
REFUSED = {"dora": "was trained for vision transformers .* choose another method|takes none out; leave it out"}


@pytest.mark.parametrize("method", plugins.available(METHODS))
def test_every_compressor_meets_its_budget_on_every_family(pipe: Pipeline, method: str) -> None:
    """PB-02, PP-09: half of each input, exactly, whatever stands between its parts; a batch answers as its rows do alone."""
    spec = method if method == "identity" else f"{method}:0.5"
    if method in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[method]):
            pipe(MEDIA[0], QUESTION, compress=spec, max_tokens=2)
        return
    items = [(MEDIA, QUESTION), (CLIP, QUESTION), ([], QUESTION)]
    found = pipe(items, compress=spec, max_tokens=2)
    for (media, _), answer in zip(items, found, strict=True):
        assert isinstance(answer, Answer), answer
        sources = media if isinstance(media, list) else [media]
        full = [pipe.vlm.encoder.count(item.size, len(item.frames) if isinstance(item, Video) else 1) for item in sources]
        kept = [Budget.of(1.0 if method == "identity" else 0.5, count).count for count in full]
        assert (answer.tokens.visual, answer.tokens.kept) == (sum(full), sum(kept))
        assert [int(sight.audit.assignment.max()) + 1 for sight in answer.sights] == kept
    assert found[0] == pipe(MEDIA, QUESTION, compress=spec, max_tokens=2)


def test_an_encoder_that_merges_nothing_sees_what_it_sees(pipe: Pipeline) -> None:
    """Tiles, squares of patches, windows and places in the order that merging takes them, for all that is merged nowhere."""
    encoder = pipe.vlm.encoder
    assert isinstance(encoder, ShorteningEncoder)
    media: list[Image | Video] = [*MEDIA, CLIP]
    counts = [len(tokens) for tokens in encoder(media)]
    frames = [len(item.frames) if isinstance(item, Video) else 1 for item in media]
    plans = [encoder.plan(item.size, f, ToMe(), count) for item, f, count in zip(media, frames, counts, strict=True)]
    # a plane that the family itself scales down is merged in the place of that
    whole = [number for number, views in enumerate(plans) if all(len(set(view.counts)) < 2 for view in views)]
    assert 2 in whole
    for number, one in zip(whole, encoder.shortened([media[i] for i in whole], [plans[i] for i in whole]), strict=True):
        (plain,) = encoder([media[number]])
        assert torch.equal(one.owner, torch.arange(counts[number])) and torch.equal(one.positions, plain.positions)
        assert one.tokens.grid == plain.grid and torch.equal(one.tokens.times, plain.times)
        for part in ("features", "positions", "weight", "saliency", "keys", "deep"):
            torch.testing.assert_close(getattr(one.tokens, part), getattr(plain, part), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def asked(pipe: Pipeline) -> list[tuple[list[Encoded], str]]:
    """Two pictures and a clip, which are encoded once for all memories."""
    return [([pipe.encode(item) for item in MEDIA], QUESTION), ([pipe.encode(CLIP)], QUESTION)]


@pytest.fixture(scope="module")
def plain(pipe: Pipeline, asked: Sequence[Question]) -> list[Answer | MmsdkError]:
    return pipe(asked, **HOW)


# One family for each way in which heads turn and see: along a line, along three axes and in windows, with features added to the first
# layers, in windows with pictures that see themselves, and both ways over a whole prompt. Others turn and see as one of these does.
KINDS = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "paligemma")
# What keeps entries as they are and judges each row by itself, so that rounding is all that company can change.
EXACT = {"dense", "paged", *(name for name in NAMES if isinstance(plugins.load(POLICIES, name), Evictor | Reader))}


@pytest.mark.parametrize("kv", [*CACHES, *(f"{name}:24" for name in NAMES)])
def test_every_kind_of_memory_holds_every_family(
    family: str, pipe: Pipeline, asked: Sequence[Question], plain: Sequence[Answer | MmsdkError], kv: str
) -> None:
    """CS-14, PB-13: what keeps everything answers as no memory does, also again; what judges each row alone as among others."""
    other, name = Pipeline(pipe.vlm, recall=recalling(kv)), kv.partition(":")[0]
    if family not in KINDS and kv not in ("dense", "paged"):
        assert isinstance(other(*asked[1], **HOW), Answer)
        return
    found = other(asked, **HOW)
    assert all(isinstance(answer, Answer) for answer in found), found
    assert name not in EXACT or other(asked[1:], **HOW) == found[1:]
    if kv in ("dense", "paged"):
        assert found == plain
    elif name in EXACT:
        assert Pipeline(pipe.vlm, recall=recalling(f"{name}:4096"))(asked[1:], **HOW) == plain[1:]


def test_a_picture_encoded_before_is_asked_about_as_it_is(pipe: Pipeline) -> None:
    for media in (MEDIA[0], CLIP):
        assert pipe(pipe.encode(media), QUESTION, max_tokens=3) == pipe(media, QUESTION, max_tokens=3)
