"""Where tokens stand once others are dropped: the cases PP-06, PP-07, PP-08 and PP-11 on a small random model of real parts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mmsdk.compress import compression
from mmsdk.decoder.prefill import Laid, prefilled
from mmsdk.decoder.thinning import thin
from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.kv.dense import DenseCache
from mmsdk.models.mini.family import Mini
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.models.mini.words import BOS
from mmsdk.models.types import VLM
from mmsdk.prompt import Ids, Layout, Prompt, Slot
from mmsdk.seeing import compress, connect, encode, enter, parted
from mmsdk.stages import Clock, Prepared, Question, Row, assemble, cuts_of, prepare, read
from mmsdk.tokenizer import TextTokenizer
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.types import Image, Media, Video, VisualTokens
from mmsdk.vision.vit import ViT, ViTConfig
from mmsdk.weights.gguf_file import read_file
from mmsdk.weights.gguf_tokenizer import tokenizer_of

LAYERS = 6


@pytest.fixture(scope="module")
def mini(mini_language: Path) -> Mini:
    """Pictures of 10 x 10 tokens, clips of as many a frame."""
    torch.manual_seed(0)
    vit = ViT(ViTConfig(width=32, layers=2, heads=2, hidden=64, grid=4)).eval().requires_grad_(False)
    sizes = {"width": 48, "layers": LAYERS, "heads": 4, "kv_heads": 2, "head_dim": 12, "inner": 96, "context": 1024}
    decoder = Decoder(DecoderConfig(vocabulary=49152, **sizes)).eval().requires_grad_(False)
    torch.nn.init.normal_(decoder.embedding.weight)
    torch.nn.init.normal_(decoder.head.weight, std=0.5)
    projector = Projector(ProjectorConfig(vision=32, hidden=32, language=48)).eval().requires_grad_(False)
    tokenizer = tokenizer_of(read_file(mini_language).metadata)
    assert isinstance(tokenizer, TextTokenizer)
    encoder = Encoder(Dinov2(vit), Preprocess(area=100), frame_pool=1)
    return Mini("small", encoder, projector, decoder, tokenizer, context=1024)


def picture(seed: int) -> Image:
    generator = torch.Generator().manual_seed(seed)
    return Image(torch.randint(0, 256, (3, 140, 140), dtype=torch.uint8, generator=generator), f"picture {seed}")


def clip(frames: int) -> Video:
    generator = torch.Generator().manual_seed(frames)
    pixels = torch.randint(0, 256, (frames, 3, 140, 140), dtype=torch.uint8, generator=generator)
    return Video(pixels, torch.arange(frames) * 0.5)


def ready(vlm: VLM, items: Sequence[Question], *spec: str) -> tuple[Prepared, DenseCache]:
    prepared = prepare(vlm, compression(spec), items, 8, Clock(torch.device("cpu")))
    assert prepared.context is not None and isinstance(prepared.context.cache, DenseCache)
    return prepared, prepared.context.cache


def held(cache: DenseCache, layer: int, row: int = 0) -> Tensor:
    """The positions that a layer holds of a row."""
    view = cache.view(layer)
    return view.positions[row][view.valid[row]]


@dataclass(frozen=True, slots=True)
class Timed(Mini):
    """The same parts in another family: each input is a frame with its time in words in front of it."""

    def layout(self, prompt: Prompt) -> Layout:
        times = [Ids(tuple(self.tokenizer.encode(f"At {number / 2} s:"))) for number in range(len(prompt.media))]
        frames = [span for number, time in enumerate(times) for span in (time, Slot(number))]
        return Layout((Ids((BOS,)), *frames, Ids(tuple(self.tokenizer.encode(prompt.text)))), media=len(times))


@pytest.mark.parametrize(("spec", "kept"), [("deft:2", 2), ("deft:60", 60), ("fastv:1", 1), ("deft:100", 100)])
def test_pp_06_timestamps_stand_where_they_stood_and_before_what_is_left_of_their_frames(mini: Mini, spec: str, kept: int) -> None:
    """PP-06: under `keep`, in a batch of three frames and of one, in every layer."""
    timed = Timed(**{field.name: getattr(mini, field.name) for field in fields(Mini)})
    items: list[Question] = [([picture(0), picture(1), picture(2)], "What happens?"), (picture(3), "Which?")]
    _, cache = ready(timed, items, spec)
    for row, (media, question) in enumerate(items):
        frames = len(media) if isinstance(media, list) else 1
        layout = timed.layout(Prompt.of([picture(i) for i in range(frames)], question))
        visual = layout.visual([100] * frames)
        words = (~visual).nonzero()[:, 0].tolist()
        for layer in range(LAYERS):
            there = held(cache, layer, row)
            assert (there.diff() > 0).all() and set(words) <= set(there.tolist())
            # a frame's tokens, and none of another's, stand between its time and what comes next
            left = torch.bincount(visual.cumsum(0)[there[visual[there]]].sub(1).div(100, rounding_mode="floor"), minlength=frames)
            assert left.min() == left.max() and (layer < LAYERS - 1 or left.tolist() == [kept] * frames)


@pytest.mark.parametrize("kept", [1, 7, 100])
def test_pp_06_under_compact_all_positions_close_up_in_order(mini: Mini, kept: int) -> None:
    """PP-06: with one token of each frame left, some, and all."""
    timed = Timed(**{field.name: getattr(mini, field.name) for field in fields(Mini)})
    prepared, cache = ready(timed, [([picture(0), picture(1), picture(2)], "What happens?")], f"uniform:{kept}")
    (row,) = prepared.rows.values()
    layout = timed.layout(Prompt.of([picture(i) for i in range(3)], "What happens?"))
    assert [span.media for span in row.spans] == [-1, -1, 0, -1, 1, -1, 2, -1] and len(row.positions) == layout.length([kept] * 3)
    assert all(held(cache, layer).tolist() == list(range(len(row.positions))) for layer in range(LAYERS))


@pytest.mark.parametrize(("spec", "entering"), [("deft:17", 174), ("fastv:17", 800)])
def test_pp_07_a_clip_pruned_inside_keeps_its_places_and_the_text_its_own(mini: Mini, spec: str, entering: int) -> None:
    """PP-07: 8 x 10 x 10 tokens to 17; the places of what is left are original ones, and the text goes on as if nothing was dropped."""
    item: Question = (clip(8), "What happens?")
    _, full = ready(mini, [item])
    prepared, thinned = ready(mini, [item], spec)
    words = int(full.position) - 801
    assert thinned.position.tolist() == full.position.tolist() and held(full, 0).tolist() == list(range(801 + words))
    ((sight,),) = (row.sights for row in prepared.rows.values())
    for layer, count in ((0, entering), (LAYERS - 1, 17)):
        there = held(thinned, layer)
        assert there[0] == 0 and there[1 + count :].tolist() == list(range(801, 801 + words))
        cells = torch.stack(torch.unravel_index(there[1 : 1 + count] - 1, (8, 10, 10)), dim=1)
        assert len(cells) == count and int(thinned.next(layer)) == 801 + words
    assert sight.grid == (8, 10, 10) and torch.equal(cells, sight.positions[sight.audit.assignment >= 0])


@pytest.mark.parametrize(
    ("spec", "first"), [("uniform:17", 17), ("simplecluster:17", 17), ("deft:17,positions=compact", 174), ("pyramiddrop:17", 800)]
)
def test_pp_07_under_compact_the_next_position_is_one_past_the_last(mini: Mini, spec: str, first: int) -> None:
    """PP-07."""
    prepared, cache = ready(mini, [(clip(8), "What happens?")], spec)
    ((sight,),) = (row.sights for row in prepared.rows.values())
    words = len(mini.tokenizer.encode("Question: What happens?\nAnswer:"))
    for layer, count in ((0, first), (LAYERS - 1, 17)):
        assert held(cache, layer).tolist() == list(range(1 + count + words)) and int(cache.next(layer)) == 1 + count + words
    assert len(sight.audit.assignment.unique()) - int((sight.audit.assignment < 0).any()) == 17


def row_of(vlm: VLM, item: Question, spec: str) -> Row:
    steps = compression(spec)
    prompts, _ = parted(read([item]))
    seen, _ = parted(encode(vlm, prompts, steps))
    shorter, _ = parted(compress(steps.before, seen))
    entered, _ = parted(enter(steps.behind, connect(vlm, shorter), {}))
    row = assemble(vlm, prompts, entered, 0, len(cuts_of(steps, LAYERS)))[0]
    assert isinstance(row, Row)
    return row


def pictures_of(mini: Mini, spec: str) -> tuple[Row, Row]:
    """The turns that have a picture."""
    return row_of(mini, (picture(0), "What is it?"), spec), row_of(mini, (picture(1), "Which of the two is brighter?"), spec)


def chat(mini: Mini, spec: str, rows: tuple[Row, Row]) -> tuple[list[Tensor], DenseCache]:
    """A picture, words alone, another picture, on one cache; the last hidden state of each turn."""
    (one, other), cuts = rows, cuts_of(compression(spec), LAYERS)
    first, cache = prefilled(mini.decoder, [Laid(one.embeddings, one.positions, one.spans)], cuts, room=8)
    words = torch.tensor([mini.tokenizer.encode("And where is it?")])
    second = mini.decoder(mini.decoder.embed(words), cache.position[:, None] + torch.arange(words.shape[1]), cache)
    third = thin(mini.decoder, other.embeddings[None], other.positions[None] + cache.position[:, None], cache, [other.spans], cuts)
    return [first.hidden[:, -1], second[:, -1], third.hidden[:, -1]], cache


@pytest.mark.parametrize(("spec", "counted", "times"), [("uniform:4", 4, 3), ("deft:0.25", 100, 20), ("pyramiddrop:9", 100, 3)])
def test_pp_08_three_turns_of_a_chat_are_the_same_every_time(mini: Mini, spec: str, counted: int, times: int) -> None:
    """PP-08: twenty times where most can differ. Positions go on in every layer, also over the turn that has no picture."""
    with torch.no_grad():
        rows = pictures_of(mini, spec)
        hidden, cache = chat(mini, spec, rows)
        # the last time from the pixels on
        for pictures in [rows] * (times - 2) + [pictures_of(mini, spec)]:
            again, other = chat(mini, spec, pictures)
            assert all(torch.equal(one, two) for one, two in zip(hidden, again, strict=True))
            assert all(torch.equal(held(cache, layer), held(other, layer)) for layer in range(LAYERS))
    asked = [mini.tokenizer.encode(f"Question: {words}\nAnswer:") for words in ("What is it?", "Which of the two is brighter?")]
    words = [1 + len(asked[0]), len(mini.tokenizer.encode("And where is it?")), 1 + len(asked[1])]
    assert cache.position.tolist() == [sum(words) + 2 * counted]
    for layer in range(LAYERS):
        there = held(cache, layer)
        assert (there.diff() > 0).all() and int(cache.next(layer)) == int(there[-1]) + 1


def test_pp_08_turns_of_a_chat_are_one_long_prompt(mini: Mini) -> None:
    """PP-08: for a method in front of the decoder, which drops before anything is cached."""
    with torch.no_grad():
        first, last = pictures_of(mini, "uniform:4")
        hidden, _ = chat(mini, "uniform:4", (first, last))
        words = mini.decoder.embed(torch.tensor([mini.tokenizer.encode("And where is it?")]))
        x = torch.cat([first.embeddings[None], words, last.embeddings[None]], dim=1)
        cache = DenseCache.allocate(LAYERS, 1, 2, 12, x.shape[1], torch.float32, "cpu")
        whole = mini.decoder(x, torch.arange(x.shape[1])[None], cache)[0]
    ends = [len(first.embeddings) - 1, len(first.embeddings) + words.shape[1] - 1, -1]
    torch.testing.assert_close(torch.cat(hidden), whole[ends], rtol=1e-4, atol=1e-4)


@dataclass(frozen=True, slots=True)
class Deep:
    """A `VisionEncoder` that also gives features for the first three layers of the language model."""

    inner: Encoder

    @property
    def width(self) -> int:
        return self.inner.width

    def count(self, size: tuple[int, int], frames: int = 1) -> int:
        return self.inner.count(size, frames)

    def __call__(self, media: Sequence[Media]) -> list[VisualTokens]:
        return [replace(tokens, deep=deep_of(tokens)) for tokens in self.inner(media)]


def deep_of(tokens: VisualTokens) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(tokens.features @ (0.5 * torch.randn(32, 48, generator=generator)) for _ in range(3))


def run(decoder: Decoder, x: Tensor, positions: Tensor, added: Sequence[Tensor], layers: range) -> Tensor:
    """These layers on one row, with what is added after each of the first three, by hooks on the layers themselves."""
    cache = DenseCache.allocate(LAYERS, 1, 2, 12, x.shape[1], torch.float32, "cpu")
    hooks = [
        decoder.layers[number].register_forward_hook(lambda _, __, out, more=more: out + more)
        for number, more in enumerate(added)
        if number in layers
    ]
    x, _ = decoder.run(x, positions, cache, layers)
    for hook in hooks:
        hook.remove()
    return x


@pytest.mark.parametrize("spec", ["identity", "random:5", "fastv:5,layer=1", "deft:5,at=0.4"])
def test_pp_11_deep_features_land_on_the_tokens_that_are_left(mini: Mini, spec: str) -> None:
    """PP-11: pruned before the decoder, after its first layer, and both before it and after its second; alone and beside a row of words."""
    parts = {name: getattr(mini, name) for name in ("name", "decoder", "tokenizer", "stop_ids", "context", "connect", "layout")}
    vlm: VLM = SimpleNamespace(encoder=Deep(mini.encoder), **parts)  # type: ignore[assignment]  # it is a VLM by its parts
    item: Question = (picture(0), "What is it?")
    prepared, _ = ready(vlm, [item, ([], "What is two and two, and what is more than that?")], spec)
    assert prepared.context is not None
    with torch.no_grad():
        (tokens,) = mini.encoder([picture(0)])
        embeddings = mini.layout(Prompt.of([picture(0)], "What is it?")).embed(
            mini.connect([tokens]), mini.decoder.embed, torch.device("cpu")
        )
        deep = [torch.zeros_like(embeddings) for _ in range(3)]
        for added, features in zip(deep, deep_of(tokens), strict=True):
            added[1:101] = features
        audit = prepared.rows[0].sights[0].audit
        kept = audit.assignment >= 0
        entered = kept if spec.startswith(("identity", "random")) else torch.ones(100, dtype=torch.bool)
        if spec.startswith("deft"):
            entered = torch.zeros(100, dtype=torch.bool).index_fill(0, tokens.saliency.argsort(descending=True, stable=True)[:24], True)
        x, added, positions = embeddings, deep, torch.arange(len(embeddings))
        if spec.startswith("random"):
            positions = torch.arange(int(kept.sum()) + len(embeddings) - 100)
        index = torch.cat([torch.tensor([0]), 1 + entered.nonzero()[:, 0], torch.arange(101, len(embeddings))])
        x, added = x[index][None], [more[index][None] for more in added]
        positions = (positions if spec.startswith("random") else positions[index])[None]
        cut = {"fastv:5,layer=1": 1, "deft:5,at=0.4": 2}.get(spec, LAYERS)
        x = run(mini.decoder, x, positions, added, range(cut))
        stay = torch.cat([torch.tensor([True]), kept[entered], torch.ones(len(embeddings) - 101, dtype=torch.bool)])
        x, added, positions = x[:, stay], [more[:, stay] for more in added], positions[:, stay]
        x = run(mini.decoder, x, positions, added, range(cut, LAYERS)) if cut < LAYERS else x
        torch.testing.assert_close(prepared.context.hidden[:1], mini.decoder.norm(x)[:, -1], rtol=1e-4, atol=1e-4)
        plain, _ = ready(mini, [item], spec)
    assert plain.context is not None and not torch.allclose(plain.context.hidden, prepared.context.hidden[:1], atol=1e-2)
