"""Policies over real sockets on this machine: the same actions as in-process, in time or not at all, and nobody harmed by a stranger."""

import http.client
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf, nan
from threading import Event, Thread
from types import ModuleType

import numpy as np
import pytest
import torch
import websockets.sync.client
import websockets.sync.server
from torch import Tensor, nn
from websockets.exceptions import ConnectionClosed, InvalidStatus

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, MmsdkError, ModelError, SafetyError, WireError
from mmsdk.vision.types import Image
from mmsdk.vision.vit import ViT, ViTConfig
from mmsdk.vla.camera import upright
from mmsdk.vla.clock import Clock, SimulatedClock, SystemClock
from mmsdk.vla.contract import Camera, Command, Contract, Feature
from mmsdk.vla.envs.planar_arm import PlanarArm, planar_contract
from mmsdk.vla.flow_model import FlowModel
from mmsdk.vla.heads.expert import ExpertConfig
from mmsdk.vla.heads.flow import FlowHead, noise_of
from mmsdk.vla.heads.paligemma import PaliGemma
from mmsdk.vla.heads.pi0 import Pi0, Pi0Config
from mmsdk.vla.loop import ControlLoop, Pace
from mmsdk.vla.types import ActionChunk, Effort, Observation, Policy, Request, Stamp
from mmsdk.vla.wire.client import RemotePolicy, Retry
from mmsdk.vla.wire.codec import decode, encode
from mmsdk.vla.wire.fields import Fields
from mmsdk.vla.wire.messages import Asked, read_error, write_reply, write_request
from mmsdk.vla.wire.server import Limits, PolicyServer, serving
from mmsdk.vla.wire.service import Keys, Service
from mmsdk.vla.worker import Delayed

JOINTS = Feature("joints", "joint", 4, "rad", (-3.0,) * 4, (3.0,) * 4)
CAMERAS = (Camera("base", 14, 14, "rgb", "hwc"), Camera("wrist", 14, 14, "bgr", "chw", 90, True))
ARM = Contract("two-eyed arm", 20.0, CAMERAS, (JOINTS,), (Command(JOINTS, "position", "absolute", "joints"),))


@dataclass
class Sampler:
    """Everything that it is told changes one number of its actions or another, so that nothing gets lost on the way unseen."""

    remembered: int = 0
    episodes: list[int] = field(default_factory=list)

    def reset(self, episode: int) -> None:
        self.remembered = 0
        self.episodes.append(episode)

    def __call__(self, request: Request) -> ActionChunk:
        seen = request.observation
        start = request.noise if request.noise.shape[0] else noise_of(seen.stamp.seed, (3, 4))
        ramp = torch.arange(3 * 14 * 14, dtype=torch.float64).reshape(3, 14, 14) / 1e5
        sight = sum(float((image.pixels * ramp).sum()) * len(name) for name, image in seen.images.items())
        told = sum(ord(letter) * place for place, letter in enumerate(seen.instruction, 1))
        extra = request.delay + 10 * request.effort + 100 * len(request.due)
        self.remembered += 1
        around = torch.tensor([sight, told, extra, self.remembered + seen.age("base", seen.stamp.captured)], dtype=torch.float64)
        return ActionChunk(start.double() + around + seen.state + request.pending.sum(), seen.stamp, "sampler")


@dataclass
class Held:
    """Waits at the request for an instruction to "wait" until it may go on; answers with the number of the request."""

    go: Event = field(default_factory=Event)
    asked: list[int] = field(default_factory=list)

    def reset(self, episode: int) -> None:
        pass

    def __call__(self, request: Request) -> ActionChunk:
        stamp = request.observation.stamp
        self.asked.append(stamp.request)
        if request.observation.instruction == "wait":
            self.go.wait(10)
        return ActionChunk(torch.full((2, 4), float(stamp.request)), stamp)


def asked(
    seed: int = 1,
    number: int = 1,
    words: str = "lift it",
    within: float = inf,
    pending: Tensor | None = None,
    clock: Clock = SystemClock(),
    **more: object,
) -> Request:
    generator = torch.Generator().manual_seed(number)
    images = {camera.name: Image(torch.randint(0, 256, (3, 14, 14), generator=generator, dtype=torch.uint8)) for camera in CAMERAS}
    stamp = Stamp(2.0, 0, number, clock.now() + within, seed)
    observation = Observation(images, torch.linspace(-0.5, 0.5, 4, dtype=torch.float64), words, stamp, {"base": 1.75})
    return Request(observation, torch.zeros(0, 4, dtype=torch.float64) if pending is None else pending, **more)


@contextmanager
def served(
    session: Callable[[], Policy], limits: Limits = Limits(), port: int = 0, api_key: str = ""
) -> Iterator[tuple[str, PolicyServer]]:
    server = PolicyServer(Service(ARM, session, noise=(3, 4)), port=port, limits=limits, api_key=api_key)
    with serving(server) as url:
        yield url, server


@contextmanager
def speaking(handler: Callable[[websockets.sync.server.ServerConnection], None]) -> Iterator[str]:
    """A server that is not ours."""

    def handled(peer: websockets.sync.server.ServerConnection) -> None:
        with suppress(ConnectionClosed):
            handler(peer)

    with websockets.sync.server.serve(handled, "127.0.0.1", 0, compression=None) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def stranger(url: str) -> Iterator[websockets.sync.client.ClientConnection]:
    """A client that is not ours and has heard the server's first message."""
    with websockets.sync.client.connect(url, compression=None, proxy=None, max_size=None) as peer:
        assert isinstance(peer.recv(), bytes)
        yield peer


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends, "it never came to be"
        time.sleep(0.005)


def refused(remote: RemotePolicy, why: str) -> None:
    """It cannot be reached, and it is told why. Its clock stands still, so that no deadline passes before a request is made.

    On a machine that is slow a request's time may be up before the first attempt to connect has failed: then the next one has longer.
    """
    for within in (0.1, 1.0, 10.0):
        with pytest.raises(WireError) as raised:
            remote(asked(within=within, clock=remote.clock))
        if re.search(rf"cannot be reached within {within:.3f} s: .*{why}", str(raised.value)):
            return
    pytest.fail(f"it says: {raised.value}")


def same(one: ActionChunk, other: ActionChunk) -> bool:
    return torch.equal(one.actions, other.actions) and one.actions.dtype == other.actions.dtype and one.stamp == other.stamp


@pytest.fixture(scope="module")
def model() -> FlowModel:
    def filled(module: nn.Module) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {name: torch.randn(tensor.shape, generator=generator) * 0.2 for name, tensor in module.state_dict().items()}

    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) % 90 + 3 for letter in text]

        def decode(self, ids: list[int]) -> str:
            return "".join(chr(token - 3) for token in ids)

    config = DecoderConfig(100, 32, 2, 4, 2, 8, 48, 128, activation="gelu_tanh")
    vit = ViT(ViTConfig(24, 1, 2, 32, 7, 2, class_token=False, layer_scale=False, activation="gelu_tanh")).eval()
    sight = PaliGemma(vit, nn.Linear(24, 32), Decoder.of(config, filled(Decoder(config))))
    network = Pi0(Pi0Config(ExpertConfig(16, 2, 4, 2, 8, 24), chunk=3, action_dim=4, state_dim=4))
    network.load_state_dict(filled(network))
    return FlowModel(sight, FlowHead(network.eval(), dims=4), Letters(), "pi0", ("base", "wrist"), side=14)


def test_vr_31_a_policy_answers_the_same_in_process_and_over_the_wire() -> None:
    pending, noise = torch.randn(2, 4, dtype=torch.float64), torch.randn(3, 4)
    requests = [
        asked(),
        asked(seed=2**63, number=7, words="Größe: 学"),
        asked(noise=noise),
        asked(pending=pending, delay=2, effort=Effort.REUSE_SLOW, due=frozenset({"expert"})),
    ]
    here = Sampler()
    with served(Sampler) as (url, server), RemotePolicy(url, ARM) as remote:
        assert isinstance(remote, Policy)
        for request in requests:
            assert same(remote(request), here(request))
        here.reset(0)
        remote.reset(0)
        assert same(remote(requests[0]), here(requests[0])) and here.remembered == 1
        assert (server.counts.answered, server.counts.clients, remote(requests[0]).producer) == (5, 1, "sampler")


def test_vr_31_a_flow_model_too_from_a_seed_or_from_noise(model: FlowModel) -> None:
    def single(seed: int, noise: Tensor = torch.zeros(0, 0)) -> Request:
        request = asked(seed=seed, noise=noise)
        return replace(request, observation=replace(request.observation, state=request.observation.state.float()))

    noise = noise_of(9, (3, 4))
    with served(lambda: model) as (url, _), RemotePolicy(url, ARM) as remote:
        for request in (single(9), single(10), single(10, noise)):
            assert same(remote(request), model(request))
        assert torch.equal(remote(single(9)).actions, remote(single(10, noise)).actions)
        assert not torch.equal(remote(single(9)).actions, remote(single(10)).actions)
        with pytest.raises(InputError, match="mmsdk/noise: 2 rows, the policy starts from 3"):
            remote(single(9, noise[:2]))


# its way to connect is deprecated since websockets 17.1, and works
@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")
def test_vr_31_openpis_own_client_gets_the_same_actions(openpi_client: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    random = np.random.default_rng(0)
    frames = {"base": random.integers(0, 256, (14, 14, 3), dtype=np.uint8), "wrist": random.integers(0, 256, (3, 14, 14), dtype=np.uint8)}
    state = np.array([0.1, -0.2, 0.3, 0.4], dtype=np.float32)
    message = {f"observation/{name}": frame for name, frame in frames.items()} | {"observation/joints": state, "prompt": "lift it"}
    images = {camera.name: upright(camera, frames[camera.name]) for camera in CAMERAS}
    here = Sampler()
    with served(Sampler) as (url, _):
        client = openpi_client.websocket_client_policy.WebsocketClientPolicy(url)
        told = client.get_server_metadata()
        assert told["contract"]["name"] == "two-eyed arm" and told["keys"]["cameras"]["wrist"] == "observation/wrist"
        for extra, seed in [({}, 1), ({}, 2), ({"mmsdk/seed": 40}, 40), ({"observation/state": state.astype(np.float64)}, 4)]:
            sent = {**message, **extra}
            if "observation/state" in extra:
                del sent["observation/joints"]
            reply = client.infer(sent)
            seen = torch.from_numpy(sent.get("observation/state", state))
            expected = here(Request(Observation(images, seen, "lift it", Stamp(0.0, seed=seed)), torch.zeros(0, 4)))
            assert np.array_equal(reply["actions"], expected.actions.numpy()) and reply["policy_timing"]["infer_ms"] >= 0
            # openpi's chunk broker slices every array of an answer by step
            assert [key for key, value in reply.items() if isinstance(value, np.ndarray)] == ["actions"]
        with pytest.raises(RuntimeError, match='missing, expected a NumPy array.*observation/wirst.*"item": "observation/wrist"'):
            client.infer({("observation/wirst" if key == "observation/wrist" else key): value for key, value in message.items()})
        assert client.infer(message)["actions"].shape == (3, 4)
        client._ws.close()


def test_keys_are_what_the_service_says_nested_or_flat() -> None:
    keys = Keys({"base": "images/cam_high", "wrist": "images/cam_low"}, state="state", ignored=frozenset({"tick"}))
    random = np.random.default_rng(0)
    images = {
        "cam_high": random.integers(0, 256, (14, 14, 3), dtype=np.uint8),
        "cam_low": random.integers(0, 256, (3, 14, 14), dtype=np.uint8),
    }
    message = {"images": images, "state": np.zeros(4), "prompt": "lift it", "tick": 3}
    with serving(PolicyServer(Service(ARM, Sampler, keys), port=0)) as url, stranger(url) as peer:
        peer.send(encode(message))
        assert isinstance(decode(peer.recv())["actions"], np.ndarray)
        peer.send(encode({**message, "tock": 3}))
        assert str(read_error(str(peer.recv()))[1]).startswith("tock: nobody asked for it; there is images/cam_high")
        with RemotePolicy(url, ARM) as remote:
            assert remote(asked()).actions.shape == (3, 4)
    with pytest.raises(InputError, match="there are keys for front, the robot has base, joints, wrist"):
        Service(ARM, Sampler, Keys({"front": "images/front"}))
    with pytest.raises(InputError, match="one key means two things"):
        Service(ARM, Sampler, Keys({"base": "prompt"}))


def test_vr_32_a_seed_gives_the_same_actions_whoever_asks_in_between() -> None:
    with served(Sampler) as (url, _), RemotePolicy(url, ARM) as one, RemotePolicy(url, ARM) as two:
        alone = [one(asked(seed=seed)) for seed in range(4)]
        one.reset(1)
        among = []
        for seed in range(4):
            two(asked(seed=77, words="something else"))
            among.append(one(asked(seed=seed)))
        assert all(torch.equal(first.actions, again.actions) for first, again in zip(alone, among, strict=True))
        assert not torch.equal(alone[0].actions, alone[1].actions)


def test_each_connection_has_a_memory_of_its_own() -> None:
    sessions: list[Sampler] = []

    def session() -> Policy:
        sessions.append(Sampler())
        return sessions[-1]

    with served(session) as (url, _), RemotePolicy(url, ARM) as one, RemotePolicy(url, ARM) as two:
        for _ in range(2):
            first, other = one(asked()), two(asked())
            assert torch.equal(first.actions, other.actions)
        one.reset(5)
        assert torch.equal(one(asked()).actions, Sampler()(asked()).actions)
        assert not torch.equal(two(asked()).actions, Sampler()(asked()).actions)
    assert [memory.remembered for memory in sessions] == [1, 3] and [memory.episodes for memory in sessions] == [[0, 0], [0]]


def test_the_policy_is_asked_one_at_a_time() -> None:
    inside, most = [0], [0]

    class Alone(Sampler):
        def __call__(self, request: Request) -> ActionChunk:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.002)
            inside[0] -= 1
            return super().__call__(request)

    answers: list[ActionChunk] = []

    def client(url: str) -> None:
        with RemotePolicy(url, ARM) as remote:
            answers.extend([remote(asked(seed=seed)) for seed in range(5)])

    with served(Alone) as (url, server):
        threads = [Thread(target=client, args=(url,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == server.counts.answered == 20 and most == [1]


def test_vr_16_a_late_reply_is_dropped_and_never_taken_for_the_next() -> None:
    def handler(peer: websockets.sync.server.ServerConnection) -> None:
        peer.send(encode(Service(ARM, Sampler).told()))
        numbers = [Fields(decode(peer.recv())).whole("mmsdk/request", 0) for _ in range(2)]
        for number in numbers:
            chunk = ActionChunk(torch.full((2, 4), float(number)), Stamp(0.0))
            peer.send(write_reply(Asked(number, asked()), chunk, 0.0, 0.0))
        peer.recv()

    with speaking(handler) as url, RemotePolicy(url, ARM) as remote:
        with pytest.raises(WireError, match="gives no answer within"):
            remote(asked(within=0.7))
        assert remote(asked(within=10)).actions.tolist() == [[2.0] * 4] * 2
        assert remote.dropped == 1


def test_vr_17_after_a_timeout_the_next_request_is_served_on_the_same_connection() -> None:
    policy = Held()
    with served(lambda: policy) as (url, server), RemotePolicy(url, ARM) as remote:
        remote(asked(number=1))
        begun = time.monotonic()
        with pytest.raises(WireError, match=r"gives no answer within 0\.\d+ s"):
            remote(asked(number=2, words="wait", within=0.2))
        assert 0.15 < time.monotonic() - begun < 2
        policy.go.set()
        for number in (3, 4):
            assert remote(asked(number=number)).actions.tolist() == [[float(number)] * 4] * 2
        assert (server.counts.clients, server.counts.late, remote.dropped) == (1, 1, 1)


def test_vr_15_a_server_that_accepts_and_never_speaks_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, RemotePolicy(f"ws://127.0.0.1:{mute.getsockname()[1]}", ARM) as remote:
        begun = time.monotonic()
        with pytest.raises(WireError, match="cannot be reached within .*does not say who it is"):
            remote(asked(within=0.2))
        assert time.monotonic() - begun < 2
        with pytest.raises(WireError, match="the deadline was .* before"):
            remote(asked(within=-1))


def test_vr_15_after_some_silence_it_connects_anew_and_the_robot_holds_meanwhile() -> None:
    contract, peers = planar_contract("position"), list[int]()

    def handler(peer: websockets.sync.server.ServerConnection) -> None:
        peers.append(len(peers))
        peer.send(encode(Service(contract, Sampler).told()))
        while True:
            peer.recv()

    clock = SimulatedClock()
    arm = PlanarArm(contract, clock)
    before = list(arm.joints)
    with speaking(handler) as url, RemotePolicy(url, contract, clock=clock, retry=Retry(silent=2, patience=0.25)) as remote:
        loop = ControlLoop(
            arm, remote, 20.0, clock=clock, pace=Pace(warm_up=0), worker=lambda policy: Delayed(policy, clock, lambda _: 0.1)
        )
        report = loop.run(20)
        assert report.held_rate > 0.7 and arm.joints == pytest.approx(before, abs=1e-12) and report.failed > 1
        assert len(peers) > 1


def test_a_loop_over_the_wire_sends_the_robot_the_very_same_commands() -> None:
    contract = planar_contract("position")

    class Reach(Sampler):
        def __call__(self, request: Request) -> ActionChunk:
            begin = request.pending[0] if request.pending.shape[0] else request.observation.state
            bright = float(request.observation.images["side"].pixels.double().mean())
            way = torch.linspace(0, 0.05, 16, dtype=torch.float64)[:, None] * torch.tensor([1.0, bright / 100, 0.0])
            wobble = noise_of(request.observation.stamp.seed, (16, 3)) * 1e-3
            return ActionChunk(begin + way + wobble, request.observation.stamp)

    class Recorded(PlanarArm):
        def apply(self, action: Tensor) -> None:
            sent.append(action.clone())
            super().apply(action)

    def run(policy: Policy, clock: SimulatedClock) -> list[Tensor]:
        sent.clear()
        delayed = lambda policy: Delayed(policy, clock, lambda _: 0.06)  # noqa: E731
        report = ControlLoop(Recorded(contract, clock), policy, 20.0, clock=clock, pace=Pace(deadline=5.0), worker=delayed).run(16)
        assert report.failed == 0 and report.held_rate < 0.5
        return list(sent)

    sent: list[Tensor] = []
    here = run(Reach(), SimulatedClock())
    clock = SimulatedClock()
    with serving(PolicyServer(Service(contract, Reach), port=0)) as url, RemotePolicy(url, contract, clock=clock) as remote:
        there = run(remote, clock)
    assert len(here) == len(there) > 16 and all(torch.equal(one, other) for one, other in zip(here, there, strict=True))


def test_what_is_late_before_its_turn_is_not_begun() -> None:
    policy = Held()
    with served(lambda: policy) as (url, server), RemotePolicy(url, ARM) as slow, RemotePolicy(url, ARM) as hasty:
        hasty(asked(number=9))
        waiting = Thread(target=slow, args=(asked(number=1, words="wait"),))
        waiting.start()
        until(lambda: policy.asked == [9, 1])
        with pytest.raises(WireError, match="gives no answer"):
            hasty(asked(number=2, within=0.5))
        until(lambda: server._busy == 2)
        # its time runs from its arrival, which on a busy machine comes late
        time.sleep(0.5)
        policy.go.set()
        waiting.join()
        until(lambda: server.counts.late == 1)
        assert policy.asked == [9, 1] and hasty(asked(number=3)).actions[0, 0] == 3


def test_who_hangs_up_while_waiting_is_not_worked_for() -> None:
    policy = Held()
    with served(lambda: policy) as (url, server), RemotePolicy(url, ARM) as slow, stranger(url) as peer:
        peer.send(write_request(Asked(4, asked(number=9)), ARM, Keys()))
        peer.recv()
        waiting = Thread(target=slow, args=(asked(number=1, words="wait"),))
        waiting.start()
        until(lambda: policy.asked == [9, 1])
        peer.send(write_request(Asked(5, asked(number=2)), ARM, Keys()))
        until(lambda: server._busy == 2)
        peer.close()
        until(lambda: server._open == 1)
        policy.go.set()
        waiting.join()
        assert slow(asked(number=3)).actions[0, 0] == 3 and policy.asked == [9, 1, 3]


@pytest.mark.parametrize("frame", [b"\xc1", pickle.dumps({"prompt": "x"}), "text", encode({"a": 1})[:-1], b"\x81\xa1a" + b"\x91" * 5000])
def test_vr_18_hostile_bytes_end_their_connection_with_a_typed_error_and_no_other(frame: bytes | str) -> None:
    with served(Sampler) as (url, server), RemotePolicy(url, ARM) as remote:
        remote(asked())
        with stranger(url) as peer:
            peer.send(frame)
            number, error = read_error(str(peer.recv()))
            assert number == 0 and type(error) is InputError
            with pytest.raises(ConnectionClosed) as closed:
                peer.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1007
        remote(asked())
        assert (server.counts.answered, server.counts.refused, server.counts.clients) == (2, 1, 2)


def test_what_is_too_large_is_refused_unread() -> None:
    with served(Sampler) as (url, server), RemotePolicy(url, ARM) as remote:
        remote(asked())
        with pytest.raises(InputError, match=r"request: \d+ bytes, the server takes 1049752"):
            remote(asked(pending=torch.zeros(40_000, 4, dtype=torch.float64)))
        with stranger(url) as peer:
            peer.send(b"\0" * (server.service.largest + 1))
            with pytest.raises(ConnectionClosed) as closed:
                peer.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
        remote(asked())
        assert server.counts.answered == 2


def test_a_message_that_is_wrong_is_told_and_the_connection_goes_on() -> None:
    good = decode(write_request(Asked(3, asked()), ARM, Keys()))
    with served(Sampler) as (url, _), stranger(url) as peer:
        for key, value, told in [
            ("observation/base", np.zeros((3, 14, 14), dtype=np.uint8), "camera base.*hwc"),
            ("observation/base", np.zeros((14, 14, 3)), "camera base.*float64"),
            ("observation/state", np.zeros(3), "expected a NumPy array of 4 numbers in a row; none is made up"),
            ("observation/state", np.array([0, 0, nan, 0]), "observation/state: it holds NaN"),
            ("prompt", ["lift it"], "prompt.*a text"),
            ("mmsdk/budget", nan, "mmsdk/budget: nan"),
            ("mmsdk/effort", 9, "mmsdk/effort: 9 is none of"),
            ("mmsdk/delay", -1, "mmsdk/delay"),
            ("mmsdk/pending", np.zeros((2, 3)), "rows of 4 numbers"),
            ("mmsdk/sed", 1, "did you mean 'mmsdk/seed'"),
        ]:
            peer.send(encode({**good, key: value}))
            number, error = read_error(str(peer.recv()))
            assert number == 3 and isinstance(error, InputError)
            with pytest.raises(InputError, match=told):
                raise error
        peer.send(encode(good))
        assert decode(peer.recv())["mmsdk/request"] == 3


class Broken(Sampler):
    """Fails as its instruction says."""

    def __call__(self, request: Request) -> ActionChunk:
        chunk = super().__call__(request)
        match request.observation.instruction:
            case "raise":
                raise RuntimeError("out of memory")
            case "refuse":
                raise SafetyError("not like this")
            case "nan":
                return replace(chunk, actions=chunk.actions * nan)
            case "narrow":
                return replace(chunk, actions=chunk.actions[:, :3])
            case "nothing":
                return replace(chunk, actions=chunk.actions[:0])
            case "another":
                return replace(chunk, stamp=replace(chunk.stamp, request=99))
            case "half a letter":
                return replace(chunk, producer="\ud800")
        return chunk


def test_vr_27_what_the_policy_does_wrong_is_told_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with served(Broken) as (url, server), RemotePolicy(url, ARM) as remote:
        wrong: list[tuple[str, type[MmsdkError], str]] = [
            ("raise", ModelError, "the policy raised RuntimeError: out of memory"),
            ("refuse", SafetyError, "not like this"),
            ("nan", SafetyError, "NaN or infinity"),
            ("narrow", SafetyError, r"shape \(3, 3\), expected actions of 4"),
            ("nothing", SafetyError, r"shape \(0, 4\)"),
            ("another", ModelError, "another stamp"),
            ("half a letter", ModelError, "does not say who made its answer"),
        ]
        for words, kind, told in wrong:
            with pytest.raises(kind, match=told):
                remote(asked(words=words))
        assert remote(asked()).actions.shape == (3, 4) and server.counts.failed == 7 and server.counts.clients == 1
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [RuntimeError]


def test_a_service_that_cannot_begin_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def session() -> Policy:
        raise ModelError("no weights")

    with served(session) as (url, _), RemotePolicy(url, ARM) as remote, pytest.raises((ModelError, WireError), match="no weights|hung up"):
        remote(asked())


def test_a_server_that_comes_back_is_found_again() -> None:
    with served(Sampler) as (url, _):
        port = int(url.rpartition(":")[2])
        remote = RemotePolicy(url, ARM, clock=SimulatedClock(), retry=Retry(first=0.02, longest=0.05))
        remote(asked())
    for _ in range(2):
        refused(remote, "Connect")
        with served(Sampler, port=port) as (again, _):
            assert again == url and remote(asked()).actions.shape == (3, 4)
    remote.close()
    with pytest.raises(WireError, match="the connection was closed"):
        remote(asked())


def test_attempts_to_connect_come_further_and_further_apart() -> None:
    attempts: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as door:

        def slam() -> None:
            for _ in range(3):
                door.accept()[0].close()
            peer, _ = door.accept()
            attempts.append(time.monotonic())
            with peer:
                peer.recv(4096)
                # nobody tries again after this
                peer.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")

        thread = Thread(target=slam, daemon=True)
        thread.start()
        with RemotePolicy(f"ws://127.0.0.1:{door.getsockname()[1]}", ARM, retry=Retry(first=0.05)) as remote:
            begun = time.monotonic()
            with pytest.raises(WireError, match="refuses the key"):
                remote(asked())
        thread.join()
    # the fourth comes after .05, .1 and .2 s, be the machine ever so slow; after .15 s if they came as close as the first two
    assert attempts[0] - begun > 0.34


def test_the_last_answer_is_given_before_the_server_ends() -> None:
    policy, answers = Held(), list[ActionChunk]()
    nowhere, limits = RemotePolicy("ws://127.0.0.1:1", ARM, clock=SimulatedClock()), Limits(grace=60.0)
    with nowhere as unreachable, served(lambda: policy, limits) as (url, _):
        refused(unreachable, "Connect")
        remote = RemotePolicy(url, ARM)
        waiting = Thread(target=lambda: answers.append(remote(asked(words="wait"))))
        waiting.start()
        until(lambda: policy.asked == [1])
        threading.Timer(0.2, policy.go.set).start()
    waiting.join()
    assert len(answers) == 1
    with pytest.raises(WireError):
        remote(asked(within=0.1))
    remote.close()


def test_a_policy_that_hangs_does_not_keep_the_server_from_ending() -> None:
    policy = Held()
    with served(lambda: policy, Limits(grace=0.05)) as (url, _), stranger(url) as peer:
        peer.send(write_request(Asked(1, asked(words="wait")), ARM, Keys()))
        until(lambda: policy.asked == [1])
        begun = time.monotonic()
    assert time.monotonic() - begun < 5
    policy.go.set()


def test_only_so_many_clients_are_let_in_and_only_so_many_requests_wait() -> None:
    policy = Held()
    with served(lambda: policy, Limits(clients=1, waiting=1)) as (url, server):
        retry = Retry(first=0.02, longest=0.02)
        with RemotePolicy(url, ARM) as first, RemotePolicy(url, ARM, clock=SimulatedClock(), retry=retry) as second:
            first(asked())
            refused(second, "503")
            first.close()
            assert second(asked()).actions.shape == (2, 4)
        until(lambda: server._open == 0)
        with stranger(url) as peer:
            # the server may have hung up before the last of them has gone
            with suppress(ConnectionClosed):
                for number in range(3):
                    peer.send(write_request(Asked(number, asked(words="wait")), ARM, Keys()))
            assert "more than 1 requests wait" in str(peer.recv())
            with pytest.raises(ConnectionClosed):
                peer.recv()
        policy.go.set()


def test_cs_13_by_default_only_this_machine_is_listened_to_and_no_web_page() -> None:
    assert PolicyServer(Service(ARM, Sampler)).host == "127.0.0.1"
    with served(Sampler) as (url, _):
        with pytest.raises(InvalidStatus) as refused:
            websockets.sync.client.connect(url, origin="http://example.org", proxy=None)
        assert refused.value.response.status_code == 403
        line = http.client.HTTPConnection(url.removeprefix("ws://"))
        line.request("GET", "/healthz")
        answer = line.getresponse()
        assert (answer.status, answer.read()) == (200, b"OK\n")
        line.close()


def test_with_a_key_only_who_brings_it_is_let_in() -> None:
    with served(Sampler, api_key="sesame") as (url, _):
        for key in ("", "sesam"):
            with RemotePolicy(url, ARM, api_key=key) as remote, pytest.raises(WireError, match="refuses the key"):
                remote(asked())
        with RemotePolicy(url, ARM, api_key="sesame") as remote:
            assert remote(asked()).actions.shape == (3, 4)


def test_a_policy_for_another_robot_is_refused_at_once() -> None:
    with served(Sampler) as (url, server):
        with (
            RemotePolicy(url, replace(ARM, rate=10.0)) as remote,
            pytest.raises(InputError, match="another robot: contract.rate is 20.0, exp"),
        ):
            remote(asked())
        with RemotePolicy(url, replace(ARM, cameras=CAMERAS[:1])) as remote, pytest.raises(InputError, match="contract.cameras"):
            remote(asked())
        assert server.counts.answered == 0


@pytest.mark.parametrize("first", [encode({}), encode({"mmsdk": {"protocol": 99}}), b"\xc1", "hello", encode({"mmsdk": {"protocol": 1}})])
def test_a_server_that_is_none_of_ours_is_refused_at_once(first: bytes | str) -> None:
    def handler(peer: websockets.sync.server.ServerConnection) -> None:
        peer.send(first)
        peer.recv()

    with speaking(handler) as url, RemotePolicy(url, ARM) as remote, pytest.raises(WireError):
        remote(asked(within=5))


@pytest.mark.parametrize(
    "answer", [b"\xc1", encode({"actions": "none"}), encode({"actions": np.zeros(3), "mmsdk/producer": "x"}), "oops", "{}"]
)
def test_an_answer_that_cannot_be_read_is_a_wire_error(answer: bytes | str) -> None:
    def handler(peer: websockets.sync.server.ServerConnection) -> None:
        peer.send(encode(Service(ARM, Sampler).told()))
        peer.recv()
        peer.send(answer)
        peer.recv()

    with speaking(handler) as url, RemotePolicy(url, ARM) as remote, pytest.raises(WireError, match="cannot be read|the server says"):
        remote(asked(within=5))


def test_vr_21_pictures_that_the_robot_has_not_are_refused_before_they_are_sent() -> None:
    with served(Sampler) as (url, _), RemotePolicy(url, ARM) as remote:
        request = asked()
        images = {"front" if name == "base" else name: image for name, image in request.observation.images.items()}
        with pytest.raises(InputError, match="pictures of front, wrist; the robot has base, wrist"):
            remote(replace(request, observation=replace(request.observation, images=images)))
        small = {name: Image(image.pixels[:, :7]) for name, image in request.observation.images.items()}
        with pytest.raises(InputError, match=r"camera base: a picture of \(7, 14\), declared \(14, 14\)"):
            remote(replace(request, observation=replace(request.observation, images=small)))


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "http://localhost:8000", "ws://", "ws://[::1", "ws://a:99999", "ws://a:b", "ws://a b:1"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="ws://host:8000"):
        RemotePolicy(url, ARM)


def test_settings_that_make_no_sense_are_refused() -> None:
    for build in (lambda: Retry(first=0.0), lambda: Retry(first=2.0, longest=1.0), lambda: Limits(clients=0), lambda: Limits(grace=inf)):
        with pytest.raises(InputError):
            build()
    with pytest.raises(InputError, match="65536 is no port"):
        PolicyServer(Service(ARM, Sampler), port=65536)
