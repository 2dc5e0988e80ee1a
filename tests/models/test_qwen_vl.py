"""Qwen's vision-language models behind the pipeline: places after compression, steps of clips, engine and recall.

That the models are right is shown in `tests/parity/test_qwen_vl.py`, that every method and cache works on them in
`tests/contracts/test_families.py`; here the reference is the model itself without the feature.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmsdk.apps.checkpoints.qwen_vl import KINDS, Kind, QwenReplica
from mmsdk.compress import Compression, compression
from mmsdk.errors import MmsdkError
from mmsdk.families import open_model
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.loop import collect, generate
from mmsdk.models.types import VLM
from mmsdk.pipeline import Pipeline
from mmsdk.prompt import Prompt, Slot, Text
from mmsdk.recall import recalling
from mmsdk.seeing import compress, connect, encode, enter, parted
from mmsdk.serve.engine import Engine
from mmsdk.stages import Clock, Row, assemble, prepare
from mmsdk.vision.encoders.qwen_vl import QwenVL
from mmsdk.vision.smart_resize import SmartResize
from mmsdk.vision.types import Image, Video


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, VLM]:
    """One of each family, loaded from a folder."""
    found: dict[Kind, VLM] = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        QwenReplica.write(kind, folder)
        found[kind] = open_model(str(folder), torch.float32, torch.device("cpu"))
    return found


def picture(height: int, width: int, seed: int = 0) -> Image:
    return Image(torch.randint(0, 256, (3, height, width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8))


def clip(frames: int, height: int, width: int, fps: float = 2.0) -> Video:
    pixels = torch.randint(0, 256, (frames, 3, height, width), generator=torch.Generator().manual_seed(frames), dtype=torch.uint8)
    return Video(pixels, torch.arange(frames) / fps)


MEDIA: list[Image | Video] = [picture(32, 48), clip(6, 24, 24), picture(40, 16, 1)]


def row_of(vlm: VLM, prompt: Prompt, steps: Compression = Compression()) -> Row:
    """A prompt in front of the decoder."""
    with torch.no_grad():
        seen, _ = parted(encode(vlm, {0: prompt}, steps))
        shorter, _ = parted(compress(steps.before, seen))
        entered, wrong = parted(enter(steps.behind, connect(vlm, shorter), asked(vlm, prompt)))
        assert not wrong
        rows, wrong = parted(assemble(vlm, {0: prompt}, entered, 8, len(steps.inside_decoder)))
    assert not wrong
    return rows[0]


def asked(vlm: VLM, prompt: Prompt) -> dict[int, Tensor]:
    return {0: vlm.decoder.embed(torch.tensor([vlm.tokenizer.encode(prompt.text)]))[0]}


def places(row: Row, media: int) -> set[tuple[int, ...]]:
    """Where the tokens of an input stand on the axes."""
    kinds = [span.media for span in row.spans for _ in range(span.counts[0])]
    return {tuple(row.turns[0][:, column].tolist()) for column, kind in enumerate(kinds) if kind == media}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["uniform:0.4", "divprune:0.4", "fastv:0.4,layer=1"])
def test_pp_07_what_is_kept_stays_where_it_was(models: dict[Kind, VLM], kind: Kind, method: str) -> None:
    prompt = Prompt((MEDIA[0], Text("Look:"), MEDIA[1], Text("What?")))
    whole, pruned = row_of(models[kind], prompt), row_of(models[kind], prompt, compression([method]))
    assert places(pruned, 0) <= places(whole, 0)
    steps = {place[0] for place in places(whole, 1)}
    assert len(places(pruned, 1)) < len(places(whole, 1)) or method.startswith("fastv")
    if method.startswith("fastv"):
        assert torch.equal(whole.turns[0], pruned.turns[0]) and torch.equal(whole.following[0], pruned.following[0])
    elif kind != "qwen3_vl":
        # the second input begins where the words after the first end, which is behind its last row and column that is left
        begins = min(min(place) for place in places(pruned, 1))
        assert {place[0] - begins for place in places(pruned, 1)} <= {step - min(steps) for step in steps}


def test_pp_07_a_clip_of_8x10x10_pruned_to_17_continues_behind_its_largest_place(models: dict[Kind, VLM]) -> None:
    vlm = models["qwen2_vl"]
    encoder = vlm.encoder
    assert isinstance(encoder, QwenVL)
    wide = QwenVL(encoder.tower, encoder.picture, SmartResize(1, 80 * 80, patch=4))
    prompt = Prompt((clip(16, 80, 80), Text("?")))
    (tokens,) = wide([prompt.media[0]])
    assert tokens.grid == (8, 10, 10)
    (kept,) = compression(["random:17,seed=3"])([tokens])
    layout = vlm.layout(prompt)
    key = (tokens.positions * torch.tensor([100, 10, 1])).sum(1)
    index = (kept.audit.assignment >= 0).nonzero()[:, 0]
    whole = layout.turns([key], [tokens], [torch.arange(800)], torch.device("cpu"))[0]
    compact = layout.turns([key[index]], [kept.tokens], [torch.arange(17)], torch.device("cpu"))[0]
    keeping = layout.turns([key], [kept.tokens], [index], torch.device("cpu"))[0]
    start = layout.lengths([0])[0]
    at = slice(start, start + 17)
    original = {tuple(place) for place in whole.axes[:, start : start + 800].T.tolist()}
    assert {tuple(place) for place in compact.axes[:, at].T.tolist()} <= original
    assert torch.equal(compact.axes[:, at], keeping.axes[:, at])
    assert torch.equal(keeping.following, whole.following)
    words = layout.fixed - start
    assert int(compact.following) == int(compact.axes[1:, at].max()) + 1 + words == int(compact.axes.max()) + 1


@pytest.mark.parametrize("left", [(), (5,), tuple(range(9)), (0, 3, 10)])
def test_pp_06_vi_11_seconds_stay_before_what_is_left_of_their_step(models: dict[Kind, VLM], left: tuple[int, ...]) -> None:
    vlm, prompt = models["qwen3_vl"], Prompt((clip(6, 24, 24), Text("?")))
    given, index = vlm.layout(prompt), torch.tensor(left, dtype=torch.int64)
    layout = given.resolved([index])
    slots = [span for span in layout.spans if isinstance(span, Slot)]
    assert [slot.start for slot in slots] == [int((index < 9 * step).sum()) for step in range(3)]
    (tokens,) = vlm.encoder([prompt.media[0]])
    assert tokens.grid == (3, 3, 3) and [f"{time:.2f}" for time in tokens.times.tolist()] == ["0.25", "1.25", "2.25"]
    (turns,) = layout.turns([index], [tokens], [torch.arange(len(left))], torch.device("cpu"))
    visual = layout.visual([len(left)])
    words = turns.axes[:, ~visual]
    assert (words[0].diff() > 0).all() and (words == words[0]).all() and int(turns.following) == int(words[0, -1]) + 1
    # of a step that is left, nothing stands at or before the words in front of it
    for column in visual.nonzero()[:, 0].tolist():
        before = turns.axes[0, :column][~visual[:column]]
        assert (turns.axes[:, column] > before.max()).all()


def test_pp_11_deep_features_are_those_of_the_tokens_that_are_kept(models: dict[Kind, VLM]) -> None:
    vlm = models["qwen3_vl"]
    whole, pruned = row_of(vlm, Prompt((MEDIA[0], Text("?")))), row_of(vlm, Prompt((MEDIA[0], Text("?"))), compression(["uniform:5"]))
    assert len(whole.deep) == len(pruned.deep) == 2
    (full,) = vlm.encoder([MEDIA[0]])
    index = (torch.arange(5) * 2 + 1) * len(full) // 10
    start = next(place for place, span in enumerate(pruned.spans) if span.media == 0)
    begin = sum(span.counts[0] for span in pruned.spans[:start])
    for layer, added in enumerate(pruned.deep):
        assert torch.equal(added[begin : begin + 5], full.deep[layer][index])
        assert not added[:begin].any() and not added[begin + 5 :].any()


def test_pp_03_scores_are_of_the_merged_grid(models: dict[Kind, VLM]) -> None:
    for vlm in models.values():
        (tokens,) = vlm.encoder([picture(32, 48)])
        assert tokens.grid == (1, 4, 6) and len(tokens) == 24 == vlm.encoder.count((32, 48)) and tokens.saliency.shape == (24,)
        assert tokens.weight.tolist() == [4.0] * 24
        # each patch receives 1 / n on average
        assert tokens.saliency.mean().item() == pytest.approx(1 / 96, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_another_question_begins_as_the_earlier_one_did(models: dict[Kind, VLM], kind: Kind) -> None:
    dense, paged = Pipeline(models[kind]), Pipeline(models[kind], recall=recalling("paged"))
    media = [picture(16, 24), clip(4, 16, 16)]
    for question in ("?", "?", "Which?"):
        answer = paged(media, question, max_tokens=4)
        assert answer == dense(media, question, max_tokens=4)
    assert answer.tokens.recalled > 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_answers_as_the_pipeline_does(models: dict[Kind, VLM], kind: Kind) -> None:
    pipe = Pipeline(models[kind])
    questions = [(MEDIA, "Which?"), ([MEDIA[1]], "What happens?"), ([], "Two and two?"), ([MEDIA[0]], "Where?")]
    with Engine(pipe, rows=3, chunk=16) as engine:
        numbers = [engine.submit(media, words, GenerationConfig(max_tokens=8)) for media, words in questions]
        done = engine.drain()
    for number, (media, words) in zip(numbers, questions, strict=True):
        assert list(done[number].ids) == said(pipe, media, words, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_who_was_set_aside_goes_on_where_it_was(models: dict[Kind, VLM], kind: Kind) -> None:
    """A pool that holds three prompts, and not three answers."""
    pipe, media = Pipeline(models[kind]), [[picture(16, 24, seed)] for seed in range(3)]
    length = len(row_of(pipe.vlm, Prompt((media[0][0], Text("What?")))).embeddings)
    with Engine(pipe, rows=3, tokens=16 * (3 * (length // 16 + 1) + 1)) as engine:
        numbers = [engine.submit(one, "What?", GenerationConfig(max_tokens=20)) for one in media]
        done = engine.drain()
    assert [list(done[number].ids) for number in numbers] == [said(pipe, one, "What?", 20) for one in media]


def said(pipe: Pipeline, media: Sequence[Image | Video], words: str, tokens: int) -> list[int]:
    """The tokens of an answer, at a batch of one."""
    vlm, configs = pipe.vlm, [GenerationConfig(max_tokens=tokens)]
    ready = prepare(vlm, Compression(), [(media, words)], tokens, Clock(torch.device("cpu")))
    assert ready.context is not None
    steps = generate(vlm.decoder, ready.context.hidden, ready.context.cache, configs, vlm.tokenizer.decode, vlm.stop_ids)
    with torch.no_grad():
        return list(collect(steps, 1)[0].ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_clip_that_comes_frame_by_frame_is_the_clip(models: dict[Kind, VLM], kind: Kind) -> None:
    pipe, item = Pipeline(models[kind]), clip(6, 24, 24)
    watch = pipe.watch("uniform", hold=1000, window=2)
    for frame, seconds in zip(item.frames, item.times.tolist(), strict=True):
        watch.push(Image(frame), seconds)
    seen = watch.encoded().tokens
    (whole,) = models[kind].encoder([item])
    assert seen.grid == whole.grid and torch.equal(seen.positions, whole.positions) and torch.equal(seen.times, whole.times)
    assert pipe(watch.encoded(), "What?", max_tokens=3) == pipe(item, "What?", max_tokens=3)


@pytest.mark.parametrize("kind", KINDS)
def test_vi_12_a_clip_and_a_picture_in_either_order(models: dict[Kind, VLM], kind: Kind) -> None:
    pipe = Pipeline(models[kind], compression(["evs:0.5"]))
    for media in ([MEDIA[1], MEDIA[0]], [MEDIA[0], MEDIA[1]]):
        answer = pipe(media, "What?", max_tokens=4)
        assert [len(audit.assignment) for audit in answer.audit] == [models[kind].encoder.count(item.size, *count(item)) for item in media]


def count(item: Image | Video) -> tuple[int, ...]:
    return (len(item.frames),) if isinstance(item, Video) else ()


@pytest.mark.parametrize("frames", range(1, 10))
@pytest.mark.parametrize("kind", KINDS)
def test_vi_02_vi_03_steps_are_pairs_of_frames_rounded_up(models: dict[Kind, VLM], kind: Kind, frames: int) -> None:
    encoder, item = models[kind].encoder, clip(frames, 16, 24, fps=4.0)
    (tokens,) = encoder([item])
    assert tokens.grid[0] == -(-frames // 2) == len(tokens.times) and len(tokens) == encoder.count(item.size, frames)
    assert models[kind].layout(Prompt((item, Text("?")))).length([len(tokens)]) > len(tokens)
    last = [item.times[-2 + frames % 2], item.times[-1]]
    assert tokens.times[-1] == (last[0] if kind == "qwen2_5_vl" else (last[0] + last[1]) / 2)
    assert tokens.weight.sum().item() == 4 * frames * tokens.grid[1] * tokens.grid[2]


@pytest.mark.parametrize(("fps", "seconds"), [(2.5, 0.8), (0.5, 4.0)])
def test_vi_07_seconds_of_a_step_are_not_cut_to_whole_ones(models: dict[Kind, VLM], fps: float, seconds: float) -> None:
    (tokens,) = models["qwen2_5_vl"].encoder([clip(8, 16, 16, fps)])
    assert torch.allclose(tokens.times.diff(), torch.tensor(seconds))


@pytest.mark.parametrize("fps", [5.0, 10.0, 29.97])
def test_vi_08_steps_stand_apart_at_any_rate(models: dict[Kind, VLM], fps: float) -> None:
    vlm, prompt = models["qwen2_5_vl"], Prompt((clip(12, 16, 16, fps), Text("?")))
    row = row_of(vlm, prompt)
    steps = sorted({place[0] for place in places(row, 0)})
    assert len(steps) == 6 and steps == sorted(set(steps))


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_of_an_extreme_aspect_are_that_rows_error(models: dict[Kind, VLM], kind: Kind) -> None:
    pipe = Pipeline(models[kind])
    wrong, right = pipe([([picture(1, 201)], "What?"), ([picture(16, 16)], "What?")], max_tokens=2)
    assert isinstance(wrong, MmsdkError) and "200 times" in str(wrong) and not isinstance(right, MmsdkError)


def test_pb_03_markers_that_a_user_types_are_words(models: dict[Kind, VLM]) -> None:
    for vlm in models.values():
        text = "<|image_pad|> and <|vision_start|><|video_pad|>"
        layout = vlm.layout(Prompt((MEDIA[0], Text(text))))
        assert sum(isinstance(span, Slot) for span in layout.spans) == 1
        assert vlm.tokenizer.encode(text) == vlm.tokenizer.encode(text[:1]) + vlm.tokenizer.encode(text[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_earlier_years_is_the_same_model(models: dict[Kind, VLM], kind: Kind, tmp_path: Path) -> None:
    """Settings side by side, axes told as a scaling, tensors named `visual.` and `model.layers.`, pixels limited by earlier names."""
    folder = Path(models[kind].name)
    shutil.copytree(folder, tmp_path / "old")
    (tmp_path / "old" / "config.json").write_text(json.dumps(earlier(json.loads((folder / "config.json").read_text()))))
    tensors = load_file(folder / "model.safetensors")
    names = {name: re.sub(r"^model\.(visual\.)?(language_model\.)?", lambda found: found[1] or "model.", name) for name in tensors}
    save_file({names[name]: tensor for name, tensor in tensors.items()}, tmp_path / "old" / "model.safetensors")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = json.loads((folder / name).read_text())
        size = settings.pop("size")
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        (tmp_path / "old" / name).write_text(json.dumps({**settings, **limits}))
    old = open_model(str(tmp_path / "old"), torch.float32, torch.device("cpu"))
    assert Pipeline(old)(MEDIA, "What?", max_tokens=6) == Pipeline(models[kind])(MEDIA, "What?", max_tokens=6)


def earlier(config: dict[str, Any]) -> dict[str, Any]:
    """Settings as they were written years ago."""
    text = config.pop("text_config")
    rotary = text.pop("rope_parameters")
    kind = "mrope" if config["model_type"] != "qwen3_vl" else "default"
    text |= {"rope_theta": rotary["rope_theta"], "rope_scaling": {"type": kind, "mrope_section": rotary["mrope_section"]}}
    if config["model_type"] == "qwen3_vl":
        return {**config, "text_config": text}
    return {**text, **config}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pb_17_half_precision_answers_with_finite_scores(models: dict[Kind, VLM], kind: Kind, dtype: torch.dtype) -> None:
    vlm = open_model(models[kind].name, dtype, torch.device("cpu"))
    for answer in Pipeline(vlm)([(MEDIA, "What?"), ([], "And?")], max_tokens=3):
        assert not isinstance(answer, MmsdkError), answer


def test_the_language_model_is_stored_in_fewer_bits(models: dict[Kind, VLM]) -> None:
    vlm = open_model(models["qwen3_vl"].name, torch.float32, torch.device("cpu"), "int8")
    answer = Pipeline(vlm)(MEDIA, "What?", max_tokens=3)
    assert answer.precision == "int8/float32" and answer.tokens.generated > 0
