"""The memory as a policy in a control loop: what is due decides the step, and the actions are those of the memory asked by hand."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError
from mmsdk.kv.selection import BlockLayout
from mmsdk.vision.types import Image
from mmsdk.vision.vit import ViT, ViTConfig
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.envs.planar_arm import PlanarArm, planar_contract
from mmsdk.vla.heads.expert import ExpertConfig
from mmsdk.vla.heads.flow import euler, noise_of
from mmsdk.vla.heads.paligemma import PaliGemma
from mmsdk.vla.loop import ControlLoop, Pace
from mmsdk.vla.memory.dual import DualMemory, MemoryConfig
from mmsdk.vla.memory.expert import DualConfig, DualExpert
from mmsdk.vla.memory.policy import DualModel, Eyes
from mmsdk.vla.memory.refine import Refiner, RefinerConfig
from mmsdk.vla.policy import Model
from mmsdk.vla.types import ActionChunk, Observation, Request, Stamp
from mmsdk.vla.worker import Delayed

CAMERAS = ("base", "wrist")
LAYOUT = BlockLayout(cameras=(4, 4), words=24)
Fill = Callable[[nn.Module, int], dict[str, Tensor]]


class Letters:
    """One token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 90 + 3 for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token - 3) for token in ids)


@pytest.fixture(scope="module")
def eyes(fill: Fill) -> PaliGemma:
    torch.manual_seed(0)
    config = DecoderConfig(100, 32, 2, 4, 2, 8, 48, 128, activation="gelu_tanh")
    vit = ViT(ViTConfig(24, 1, 2, 32, 7, 2, class_token=False, layer_scale=False, activation="gelu_tanh")).eval()
    return PaliGemma(vit, nn.Linear(24, 32), Decoder.of(config, fill(Decoder(config), 0)))


@pytest.fixture
def model(eyes: PaliGemma, fill: Fill) -> DualModel:
    refiner = Refiner(eyes.decoder.config, LAYOUT, RefinerConfig(sight=32, width=16, layers=1, heads=2, inner=24, queries=3))
    refiner.load_state_dict(fill(refiner, 1))
    network = DualExpert(DualConfig(ExpertConfig(16, 2, 4, 2, 8, 24), chunk=6, action_dim=4, state_dim=4))
    network.load_state_dict(fill(network, 2))
    memory = DualMemory(eyes.decoder, refiner.eval(), MemoryConfig(period=3.0))
    assert isinstance(eyes, Eyes)
    return DualModel(eyes, memory, network.eval(), Letters(), CAMERAS, dims=4, side=14)


def request(number: int, due: set[str]) -> Request:
    generator = torch.Generator().manual_seed(number)
    images = {name: Image(torch.randint(0, 256, (3, 14, 14), generator=generator, dtype=torch.uint8), name) for name in CAMERAS}
    stamp = Stamp(float(number), request=number + 1, seed=9 + number)
    return Request(Observation(images, torch.tensor([0.1, 0.2, 0.3, 0.0]), "lift_it", stamp), torch.zeros(0, 4), due=frozenset(due))


DUE = [{"vlm", "adapter", "expert"}, {"adapter", "expert"}, {"adapter", "expert"}, {"vlm", "expert"}, {"expert"}]


def test_what_is_due_decides_the_step(model: DualModel, eyes: PaliGemma) -> None:
    assert isinstance(model, Model)
    chunks = [model(request(number, due)) for number, due in enumerate(DUE)]
    assert [chunk.producer for chunk in chunks] == ["d2 slow", "d2 fast", "d2 fast", "d2 slow", "d2 slow"]
    assert [chunk.stamp.captured for chunk in chunks] == [0.0, 1.0, 2.0, 3.0, 4.0]
    model.reset(1)
    ids = torch.tensor([[2, *Letters().encode("lift it\n")]])
    present, state = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[0.1, 0.2, 0.3, 0.0]])
    for number, chunk in enumerate(chunks[:2]):
        images = request(number, set()).observation.images
        pixels = torch.stack([images[name].pixels for name in CAMERAS])[None].float() / 127.5 - 1
        with torch.no_grad():
            sight = eyes.see(pixels)
        said = torch.ones_like(ids, dtype=torch.bool)
        turn = model.memory.fast(float(number), sight, present) if number else model.memory.slow(0.0, sight, present, ids, said)
        expected = euler(model.network.velocity(turn.context, state), noise_of(9 + number, (6, 4))[None])
        torch.testing.assert_close(chunk.actions, expected[0])


class Standing:
    """Lets the model think about what an arm sees, notes which step it took, and stays where it is."""

    def __init__(self, model: DualModel) -> None:
        self.model = model
        self.steps: list[str] = []

    def reset(self, episode: int) -> None:
        self.model.reset(episode)

    def __call__(self, request: Request) -> ActionChunk:
        seen = request.observation
        images = {name: Image(seen.images["side"].pixels[:, :14, :14], name) for name in CAMERAS}
        felt = replace(seen, images=images, state=torch.nn.functional.pad(seen.state, (0, 1)).float())
        self.steps.append(self.model(replace(request, observation=felt, pending=torch.zeros(0, 4))).producer)
        return ActionChunk(seen.state.expand(6, 3), seen.stamp)


def test_in_a_loop_slow_and_fast_steps_take_turns(model: DualModel) -> None:
    clock = SimulatedClock()
    robot, policy = PlanarArm(planar_contract("position", 20.0), clock), Standing(model)
    pace = Pace(expert=2, adapter=2, vlm=6)
    loop = ControlLoop(robot, policy, 20.0, clock=clock, pace=pace, worker=lambda policy: Delayed(policy, clock, lambda request: 0.01))
    report = loop.run(ticks=24)
    # what was asked to warm up is forgotten
    assert policy.steps == ["d2 slow", *["d2 slow", "d2 fast", "d2 fast"] * 4]
    assert report.failed == 0 and report.refused_chunks == 0


def test_eyes_see_camera_by_camera(eyes: PaliGemma) -> None:
    pixels = torch.rand(2, 2, 3, 14, 14)
    with torch.no_grad():
        seen = eyes.see(pixels)
        assert seen.shape == (2, 8, 32)
        torch.testing.assert_close(seen[1, 4:], eyes.connector(eyes.vit(pixels[1, 1:]).tokens)[0])


def test_an_episode_that_lost_its_first_answer_begins_with_a_slow_step(model: DualModel) -> None:
    assert model(request(0, {"adapter", "expert"})).producer == "d2 slow"


def test_a_new_episode_knows_nothing_of_the_last(model: DualModel) -> None:
    first = model(request(0, DUE[0])).actions
    model(request(3, DUE[0]))
    model.reset(1)
    assert torch.equal(model(request(0, DUE[0])).actions, first)


def test_what_was_seen_before_counts(model: DualModel) -> None:
    model(request(0, DUE[0]))
    after = model(request(3, DUE[0])).actions
    model.reset(1)
    assert not torch.allclose(model(request(3, DUE[0])).actions, after, atol=1e-4)


def test_a_prompt_longer_than_a_blocks_words_is_refused(model: DualModel) -> None:
    asked = request(0, DUE[0])
    with pytest.raises(InputError, match="the model was made for 24"):
        model(replace(asked, observation=replace(asked.observation, instruction="lift the red cube onto the blue one")))
