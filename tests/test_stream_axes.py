"""Streams of models whose heads turn along three axes: places as in a prompt, and keys where a rotation from scratch has them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmsdk.apps.checkpoints.qwen_vl import KINDS, Kind, QwenReplica
from mmsdk.decoder.prefill import Laid
from mmsdk.errors import BudgetError, ModelError
from mmsdk.families import open_model
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.models.types import VLM
from mmsdk.pipeline import Pipeline
from mmsdk.stream import StreamSession
from mmsdk.vision.types import Video


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, VLM]:
    """One of each family, loaded from a folder."""
    found: dict[Kind, VLM] = {}
    for kind in KINDS:
        folder: Path = tmp_path_factory.mktemp(kind)
        QwenReplica.write(kind, folder)
        found[kind] = open_model(str(folder), torch.float32, torch.device("cpu"))
    return found


def frames_of(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, 3, 24, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def shown(stream: StreamSession, frames: Tensor, first: int = 0) -> StreamSession:
    for number, pixels in enumerate(frames, first):
        stream.push(pixels, float(number))
    return stream


@pytest.mark.parametrize("kind", KINDS)
def test_while_everything_is_held_it_is_the_prompt(models: dict[Kind, VLM], kind: Kind) -> None:
    """Windows of four frames are clips side by side, and the pipeline's prompts are held against transformers."""
    pipe, frames = Pipeline(models[kind]), frames_of(8)
    stream = shown(pipe.stream_session("window:400", window=4), frames)
    clips = [Video(part, torch.arange(4).float()) for part in frames.split(4)]
    wanted = pipe(clips, "What happens?", max_tokens=6)
    answer = stream.ask("What happens?", max_tokens=6)
    assert str(answer) == str(wanted) and answer.tokens.prompt == wanted.tokens.prompt


@pytest.mark.parametrize(("kv", "sinks"), [("window:64", 0), ("streaming:64", 4)])
def test_keys_are_where_a_rotation_from_scratch_has_them(
    models: dict[Kind, VLM], kv: str, sinks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was read is placed anew, window by window, moved so that the next word stands where the stream has it, and turned once.

    Sinks are moved on by one shift on all axes, by which the last of them is in time right in front of the window's first token.
    """
    vlm, read = models["qwen2_vl"], list[Laid]()
    own = StreamSession._run

    def noted(self: StreamSession, cache: PolicyCache, laid: Laid) -> Tensor:
        read.append(laid)
        return own(self, cache, laid)

    monkeypatch.setattr(StreamSession, "_run", noted)
    stream = vlm_stream(vlm, kv)
    for start in range(0, 96, 4):
        shown(stream, frames_of(4, start), start)
        stream.say("now")
        assert int(stream.cache.position[0]) <= 128
    cache, axes, following = stream.cache, list[Tensor](), 0
    for laid in read:
        grid = laid.turns[0]
        axes.append(grid + following)
        visual = [span.media >= 0 for span in laid.spans for _ in range(span.counts[0])]
        if any(visual):
            # behind a window the next word is behind its last row or column, whichever is further
            words = visual.index(True)
            assert torch.equal(grid[:, :words], torch.arange(words).expand(3, -1)) and int(laid.following[0]) == int(grid[1:].max()) + 1
        following += int(laid.following[0])
    every, last = torch.cat(axes, 1), 64 - sinks
    moved = every[:, -last:] - following + int(cache.position[0] + cache.shift[0])
    first = every[:, :sinks]
    moved = torch.cat((first + moved[0, 0] - 1 - first[0, -1:], moved), 1)
    assert int(moved.min()) >= 0 and int(moved.max()) <= 128 < following
    config, weights = vlm.decoder.config, {name: x.double() for name, x in vlm.decoder.layers[0].state_dict().items()}
    x = torch.cat([laid.embeddings for laid in read])
    x = torch.cat((x[:sinks], x[-last:])).double()
    x = x * (x.square().mean(1, keepdim=True) + config.norm_eps).rsqrt() * weights["norm1.weight"]
    here = slice(config.heads * config.head_dim, (config.heads + config.kv_heads) * config.head_dim)
    keys = x @ weights["attention.qkv.weight"][here].T + weights["attention.qkv.bias"][here]
    left, right = keys.view(64, config.kv_heads, config.head_dim).transpose(0, 1).chunk(2, -1)
    time, row, _ = config.rope_sections.counts
    half = config.head_dim // 2
    angles = torch.stack(
        [
            moved[0 if channel < time else 1 if channel < time + row else 2].double() * config.rope_theta ** (-channel / half)
            for channel in range(half)
        ],
        1,
    )
    wanted = torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), -1)
    torch.testing.assert_close(cache.view(0).keys[0].double(), wanted, rtol=1e-4, atol=1e-4)


def vlm_stream(vlm: VLM, kv: str) -> StreamSession:
    return Pipeline(vlm).stream_session(kv, window=4)


@pytest.mark.parametrize("kv", ["window:72", "streaming:72"])
@pytest.mark.parametrize("kind", KINDS)
def test_closing_up_changes_no_answer(models: dict[Kind, VLM], kind: Kind, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = shown(vlm_stream(models[kind], kv), frames_of(40))
    said = stream.ask("What?", max_tokens=8)
    assert int(stream.cache.shift) != 0 and int(stream.cache.position[0]) <= 144
    monkeypatch.setattr(PolicyCache, "close_up", lambda _: None)
    never = shown(vlm_stream(models[kind], kv), frames_of(40))
    assert int(never.cache.position[0]) > 144
    assert said.ids == stream.ask("What?", max_tokens=8).ids == never.ask("What?", max_tokens=8).ids


def test_streaming_goes_on_and_what_leaves_gaps_is_refused(models: dict[Kind, VLM]) -> None:
    vlm = models["qwen2_vl"]
    stream = shown(vlm_stream(vlm, "streaming:64"), frames_of(48))
    assert stream.held == 64 and stream.ask("What?", max_tokens=4).tokens.visual == 48 // 4 * 2 * 12
    for kv in ("h2o:64", "tiered:64", "thinkv:200", "omnitide:64", "tova:64"):
        with pytest.raises(ModelError, match="several axes"):
            vlm_stream(vlm, kv)
    with pytest.raises(BudgetError, match=f"context is {vlm.context}"):
        vlm_stream(vlm, f"window:{vlm.context + 1}")
