"""A flow model end to end at a tiny size: what it sees, what it is told, and how it goes on from what is committed."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError
from mmsdk.vision.types import Image
from mmsdk.vision.vit import ViT, ViTConfig
from mmsdk.vla.chunking.rtc import RealTimeChunking
from mmsdk.vla.flow_model import FlowModel, Sight
from mmsdk.vla.heads.expert import ExpertConfig
from mmsdk.vla.heads.flow import FlowHead, euler, noise_of
from mmsdk.vla.heads.paligemma import PaliGemma
from mmsdk.vla.heads.pi0 import Pi0, Pi0Config
from mmsdk.vla.types import Effort, Observation, Request, Stamp

CAMERAS = ("base", "wrist")


class Letters:
    """One token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 90 + 3 for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token - 3) for token in ids)


def filled(module: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(tensor.shape, generator=generator) * 0.2 for name, tensor in module.state_dict().items()}


@pytest.fixture(scope="module")
def model() -> FlowModel:
    torch.manual_seed(0)
    config = DecoderConfig(100, 32, 2, 4, 2, 8, 48, 128, activation="gelu_tanh")
    vit = ViT(ViTConfig(24, 1, 2, 32, 7, 2, class_token=False, layer_scale=False, activation="gelu_tanh")).eval()
    sight = PaliGemma(vit, nn.Linear(24, 32), Decoder.of(config, filled(Decoder(config))))
    network = Pi0(Pi0Config(ExpertConfig(16, 2, 4, 2, 8, 24), chunk=6, action_dim=4, state_dim=4))
    network.load_state_dict(filled(network))
    assert isinstance(sight, Sight)
    return FlowModel(sight, FlowHead(network.eval(), dims=4), Letters(), "pi0", CAMERAS, side=14)


def request(
    changed: str = "", pending: Tensor | None = None, delay: int = 0, effort: Effort = Effort.FULL, words: str = "lift_it"
) -> Request:
    generator = torch.Generator().manual_seed(1)
    images = {name: torch.randint(0, 256, (3, 14, 14), generator=generator, dtype=torch.uint8) for name in CAMERAS}
    pictures = {name: Image(255 - pixels if name == changed else pixels, name) for name, pixels in images.items()}
    observation = Observation(pictures, torch.tensor([0.1, 0.2, 0.3, 0.0]), words, Stamp(2.0, request=3, seed=9))
    return Request(observation, torch.zeros(0, 4) if pending is None else pending, delay, effort)


def test_a_chunk_is_prefix_head_and_noise_put_together(model: FlowModel) -> None:
    asked = request()
    chunk = model(asked)
    pixels = torch.stack([asked.observation.images[name].pixels for name in CAMERAS])[None].float() / 127.5 - 1
    ids = torch.tensor([[2, *Letters().encode("lift it"), *Letters().encode("\n")]])
    context = model.sight.prefix(pixels, torch.ones(1, 2, dtype=torch.bool), ids, torch.ones_like(ids, dtype=torch.bool), 0)
    expected = euler(model.head.network.velocity(context, asked.observation.state[None]), noise_of(9, (1, 6, 4)), 10)[0]
    torch.testing.assert_close(chunk.actions, expected)
    assert chunk.stamp == asked.observation.stamp and chunk.producer == "pi0"


def test_vr_22_a_camera_that_is_absent_is_seen_by_nothing(model: FlowModel) -> None:
    blind = FlowModel(model.sight, model.head, Letters(), "pi0", CAMERAS, side=14, absent=("wrist",))
    torch.testing.assert_close(blind(request("wrist")).actions, blind(request()).actions)
    assert not torch.allclose(model(request("wrist")).actions, model(request()).actions)
    assert not torch.allclose(blind(request("base")).actions, blind(request()).actions)


def test_what_is_committed_is_kept(model: FlowModel) -> None:
    joined = FlowModel(model.sight, model.head, Letters(), "pi0", CAMERAS, side=14, chunking=RealTimeChunking("hard-prefix"))
    pending = noise_of(5, (4, 4))
    torch.testing.assert_close(joined(request(pending=pending, delay=2)).actions[:2], pending[:2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(joined(request()).actions, model(request()).actions)
    torch.testing.assert_close(model(request(pending=pending, delay=2)).actions, model(request()).actions)
    guided = FlowModel(model.sight, model.head, Letters(), "pi0", CAMERAS, side=14, chunking=RealTimeChunking("vjp"))(
        request(pending=pending, delay=2)
    )
    free = model(request()).actions
    assert float((guided.actions - pending[:1])[0].abs().sum()) < float((free - pending[:1])[0].abs().sum())


def test_a_lower_effort_takes_fewer_steps(model: FlowModel) -> None:
    short = FlowModel(model.sight, FlowHead(model.head.network, 4, steps=4), Letters(), "pi0", CAMERAS, side=14)
    torch.testing.assert_close(model(request(effort=Effort.FEWER_STEPS)).actions, short(request()).actions)


def test_wrong_pictures_and_long_prompts_are_named(model: FlowModel) -> None:
    with pytest.raises(InputError, match="no picture of third; there is base, wrist"):
        FlowModel(model.sight, model.head, Letters(), "pi0", (*CAMERAS, "third"), side=14)(request())
    with pytest.raises(InputError, match=r"camera base.*\(14, 14\).*28 x 28"):
        FlowModel(model.sight, model.head, Letters(), "pi0", CAMERAS, side=28)(request())
    with pytest.raises(InputError, match="62 tokens, the model was made for 48"):
        model(request(words="x" * 60))


def test_each_family_is_told_in_its_own_words(model: FlowModel) -> None:
    told: dict[str, list[int]] = {}
    for wording in ("pi05", "smolvla"):
        other = FlowModel(model.sight, model.head, Letters(), wording, CAMERAS, side=14, start=(), limit=200, state_dims=2)
        told[wording] = other._ids(request().observation)
    assert told["pi05"] == Letters().encode("Task: lift it, State: 140 153;\nAction: ")
    assert told["smolvla"] == Letters().encode("lift_it\n")
