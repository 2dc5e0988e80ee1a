"""The default policy around weights of toy size: mini's real eyes and words, and everything between a request and a chunk."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmsdk.compress import compression
from mmsdk.errors import InputError
from mmsdk.vision.types import Image
from mmsdk.vla.chunking.rtc import RealTimeChunking
from mmsdk.vla.default import WEIGHTS, Learned, action_network, default_policy, eyes, read_learned, write_learned
from mmsdk.vla.envs.metaworld import CAMERAS, TASKS, sawyer
from mmsdk.vla.envs.metaworld_orders import SIDE
from mmsdk.vla.flow_model import FlowModel
from mmsdk.vla.heads.glance import Glance, GlanceConfig
from mmsdk.vla.heads.minisight import Lexicon, MiniSight, standing
from mmsdk.vla.types import Observation, Request, Stamp
from mmsdk.weights.bundle import Bundle
from mmsdk.weights.gguf import read_gguf

CONFIG = GlanceConfig(width=32, heads=2, inner=48, queries=3, looks=1, layers=2)


@pytest.fixture(scope="module")
def weights(mini_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    glance, network = Glance(CONFIG), action_network(CONFIG, 6, sawyer())
    glance.axes.normal_(std=0.05)
    torch.nn.init.normal_(network.action_out.weight)
    mean, std = torch.tensor([0.0, 0.6, 0.2, 0.9]).double(), torch.tensor([0.1, 0.1, 0.05, 0.2]).double()
    statistics = {"state": {"mean": mean, "std": std}, "action": {"mean": torch.zeros(4).double(), "std": std / 20}}
    path = tmp_path_factory.mktemp("weights") / "toy.safetensors"
    write_learned(path, Learned(glance, network, statistics))
    return path


def request(seed: int = 0, instruction: str = "open the door", pending: torch.Tensor | None = None) -> Request:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, SIDE, SIDE)
    images = {name: Image(torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8), name) for name in CAMERAS}
    state = torch.tensor([0.05, 0.55, 0.21, 1.0], dtype=torch.float64)
    none = torch.zeros(0, 4, dtype=torch.float64)
    return Request(Observation(images, state, instruction, Stamp(1.0, seed=3)), none if pending is None else pending, 2)


def test_a_chunk_hangs_on_what_is_seen_and_on_what_is_said(weights: Path) -> None:
    policy = default_policy(weights=weights)
    chunk = policy(request())
    assert chunk.actions.shape == (6, 4) and bool(chunk.actions.isfinite().all()) and chunk.stamp == request().observation.stamp
    assert torch.equal(policy(request()).actions, chunk.actions)
    for other in (request(1), request(instruction=TASKS["reach-v3"][0])):
        assert not torch.allclose(policy(other).actions, chunk.actions)
    # each camera is looked at by itself
    turned = request()
    swapped = dict(zip(CAMERAS, reversed(list(turned.observation.images.values())), strict=True))
    assert not torch.allclose(policy(replace(turned, observation=replace(turned.observation, images=swapped))).actions, chunk.actions)


def test_fewer_tokens_and_what_is_committed_change_the_answer_and_what_cannot_be_is_refused(weights: Path) -> None:
    policy = default_policy(weights=weights, dtype="float32", compress="uniform:1.0", chunking=RealTimeChunking("hard-prefix"))
    model = policy.model
    assert isinstance(model, FlowModel) and isinstance(model.sight, MiniSight)
    whole = policy(request()).actions

    def kept(spec: str) -> torch.Tensor:
        assert isinstance(model, FlowModel) and isinstance(model.sight, MiniSight)
        sight = replace(model.sight, compression=compression(spec))
        return replace(policy, model=replace(model, sight=sight))(request()).actions

    torch.testing.assert_close(kept("identity"), whole)
    assert not torch.allclose(kept("divprune:0.25"), whole)
    pending = torch.tensor([[0.004, -0.002, 0.001, 0.5]], dtype=torch.float64).repeat(4, 1)
    torch.testing.assert_close(policy(request(pending=pending)).actions[:2].double(), pending[:2], atol=1e-5, rtol=1e-4)
    for inside in ("tome:0.5", "simplecluster:0.5", "fastv:0.5"):
        with pytest.raises(InputError, match="behind the encoder"):
            kept(inside)


def test_words_are_those_of_the_language_model(mini_bundle: Bundle) -> None:
    lexicon = Lexicon.of(mini_bundle.language)
    ids = torch.tensor([[1, 502, 9], [48000, 3, 3]])
    _, state, _ = read_gguf(mini_bundle.language, torch.float32)
    torch.testing.assert_close(lexicon(ids), state["embedding.weight"][ids])


def test_a_picture_is_a_grid_of_patches_without_resizing(mini_bundle: Bundle) -> None:
    encoder = eyes(mini_bundle.encoder)
    assert encoder.count((SIDE, SIDE)) == 64 and encoder.width == 768 == GlanceConfig().vision
    (tokens,) = encoder([request().observation.images["side"]])
    places = standing(tokens, 1, 2)
    assert places.shape == (64, GlanceConfig().place) and places[:, -2:].tolist() == [[0.0, 1.0]] * 64
    torch.testing.assert_close(places[9, 1:3], torch.tensor([1.5 / 8, 1.5 / 8]))


def test_what_ships_is_small_and_says_how_it_was_made() -> None:
    assert WEIGHTS.stat().st_size < 20e6
    learned = read_learned(WEIGHTS)
    assert "50 demonstrations" in learned.made and learned.network.chunk == 16
