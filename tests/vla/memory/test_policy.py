"""The memory as a policy in a control loop: what is due decides the step, and the actions are those of the memory asked by hand."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, SafetyError
from mmsdk.kv.selection import BlockLayout, Selection
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
    return made(eyes, fill)


def made(eyes: PaliGemma, fill: Fill, selection: Selection = Selection()) -> DualModel:
    refiner = Refiner(eyes.decoder.config, LAYOUT, RefinerConfig(sight=32, width=16, layers=1, heads=2, inner=24, queries=3))
    refiner.load_state_dict(fill(refiner, 1))
    network = DualExpert(DualConfig(ExpertConfig(16, 2, 4, 2, 8, 24), chunk=6, action_dim=4, state_dim=4))
    network.load_state_dict(fill(network, 2))
    memory = DualMemory(eyes.decoder, refiner.eval(), MemoryConfig(period=3.0, selection=selection))
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


def spoilt(asked: Request, **changes: object) -> Request:
    return replace(asked, observation=replace(asked.observation, **changes))


def without_finite_state(model: DualModel, asked: Request) -> None:
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="state: it is not finite"):
            model(spoilt(asked, state=torch.tensor([0.1, wrong, 0.3, 0.0])))


def with_too_long_a_state(model: DualModel, asked: Request) -> None:
    with pytest.raises(InputError, match="state"):
        model(spoilt(asked, state=torch.zeros(5)))


def with_too_many_words(model: DualModel, asked: Request) -> None:
    with pytest.raises(InputError, match="the model was made for 24"):
        model(spoilt(asked, instruction="lift the red cube onto the blue one"))


def while_it(part: Callable[[DualModel], nn.Module], calls: int) -> Callable[[DualModel, Request], None]:
    """Ctrl-C in some call of a part."""

    def broken_off(model: DualModel, asked: Request) -> None:
        left = [calls]

        def interrupt(*_: object) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        hook = part(model).register_forward_pre_hook(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                model(asked)
        finally:
            hook.remove()

    return broken_off


def with_actions_that_are_no_numbers(model: DualModel, asked: Request) -> None:
    hook = model.network.register_forward_hook(lambda module, given, out: out * torch.nan)
    with pytest.raises(SafetyError, match="not finite"):
        model(asked)
    hook.remove()


SLOW, FAST, AGAIN = DUE[0], DUE[1], DUE[4]
READING = while_it(lambda model: model.memory.decoder.layers[1], 0)
REFINING = while_it(lambda model: model.memory.refiner.editors[1], 0)
ACTING = while_it(lambda model: model.network.expert, 7)
REFUSED = [without_finite_state, with_too_long_a_state, with_too_many_words, ACTING, with_actions_that_are_no_numbers]


@pytest.mark.parametrize(
    ("due", "refused"),
    [(SLOW, READING), (FAST, REFINING), *((due, refused) for refused in REFUSED for due in (SLOW, FAST)), (AGAIN, ACTING)],
)
def test_a_request_that_is_refused_or_breaks_off_leaves_no_trace(
    eyes: PaliGemma, fill: Fill, due: set[str], refused: Callable[[DualModel, Request], None]
) -> None:
    """In full queues, with scores: all that is held is the very same, and the next answers are those of a model that was never asked."""
    one, clean = (made(eyes, fill, Selection(tokens=4, reserve=1)) for _ in range(2))
    for model in (one, clean):
        for number, parts in enumerate([SLOW] * 4 + [FAST] * 2):
            model(request(number, parts))
    memory = one.memory
    before = memory.slow_queue.entries, memory.fast_queue.entries, memory.again()
    refused(one, request(6, due))
    after = memory.slow_queue.entries, memory.fast_queue.entries, memory.again()
    assert all(now is then for now, then in zip(after, before, strict=True))
    for number, parts in enumerate([FAST, SLOW, FAST], start=7):
        assert torch.equal(one(request(number, parts)).actions, clean(request(number, parts)).actions)


def test_a_step_of_the_memory_alone_that_breaks_off_leaves_no_trace(model: DualModel) -> None:
    memory = model.memory
    for number in range(4):
        model(request(number, DUE[0]))
    before = memory.slow_queue.entries

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ids = torch.tensor([[2, 3]])
    hook = memory.decoder.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        memory.slow(9.0, torch.zeros(1, 8, 32), torch.ones(1, 2, dtype=torch.bool), ids, torch.ones_like(ids, dtype=torch.bool))
    hook.remove()
    assert memory.slow_queue.entries is before


def test_one_model_in_several_threads_answers_whole_requests(eyes: PaliGemma, fill: Fill) -> None:
    """Two ask and one resets: nothing fails, and an episode after that is that of a model of its own."""
    one, other = (made(eyes, fill, Selection(tokens=4, reserve=1)) for _ in range(2))

    def act() -> None:
        for number, due in enumerate(DUE * 3):
            assert bool(one(request(number, due)).actions.isfinite().all())

    def begin() -> None:
        for number in range(300):
            one.reset(number)

    with ThreadPoolExecutor(3) as pool:
        for ended in [pool.submit(work) for work in (act, act, begin)]:
            ended.result()
    one.reset(1)
    for number, due in enumerate(DUE):
        assert torch.equal(one(request(number, due)).actions, other(request(number, due)).actions)


def test_a_reset_waits_for_the_request_that_is_being_answered(model: DualModel) -> None:
    """What it saw does not come into the next episode."""
    begun = list[Future[None]]()

    def begin(*_: object) -> None:
        if not begun:
            begun.append(pool.submit(model.reset, 1))
            assert not wait(begun, 0.2).done and model.memory.started

    with ThreadPoolExecutor(1) as pool:
        hook = model.network.expert.register_forward_pre_hook(begin)
        chunk = model(request(0, DUE[0]))
        hook.remove()
        begun[0].result(60.0)
    assert chunk.producer == "d2 slow" and not model.memory.started
