"""A recorded loop, replayed from its bag alone: the same code told the same things sends the same commands, bit for bit."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmsdk.errors import InputError, ModelError, SafetyError
from mmsdk.vla.clock import SimulatedClock, SystemClock
from mmsdk.vla.contract import Contract, Timing, Workspace
from mmsdk.vla.drive import Drive, Session, Settings
from mmsdk.vla.envs.planar_arm import PlanarArm, planar_contract, tool
from mmsdk.vla.loop import Pace
from mmsdk.vla.record.recorder import Recording
from mmsdk.vla.record.replay import Replay, Replayed, Tape
from mmsdk.vla.ros.bag import BagWriter, Storage, read_bag
from mmsdk.vla.ros.messages import Header, Image, JointState, Message, String, Time
from mmsdk.vla.types import ActionChunk, Observation, Request
from mmsdk.vla.worker import Delayed


@dataclass
class Wander:
    """Wherever the seed says; raises and answers NaN now and then, as float32 and as float64."""

    asked: int = 0

    def reset(self, episode: int) -> None:
        self.asked = 0

    def __call__(self, request: Request) -> ActionChunk:
        self.asked += 1
        stamp, state = request.observation.stamp, request.observation.state
        if self.asked % 7 == 3:
            raise ZeroDivisionError("a policy of no great skill")
        generator = torch.Generator().manual_seed(stamp.seed)
        steps = 0.3 * torch.randn(12, 3, generator=generator, dtype=torch.float64)
        actions = state + steps.cumsum(0)
        if self.asked % 5 == 4:
            actions[0, 1] = float("nan")
        return ActionChunk(actions.float() if self.asked % 2 else actions, stamp, "wander")


@dataclass
class Faulty:
    """An arm whose reports fail, freeze and go astray, and that keeps what it was sent."""

    arm: PlanarArm
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(4))
    sent: list[list[float]] = field(default_factory=list)

    @property
    def contract(self) -> Contract:
        return self.arm.contract

    def observe(self) -> Observation:
        seen = self.arm.observe()
        kind = int(torch.randint(12, (), generator=self.generator))
        if kind == 0:
            raise InputError("the cable is loose", item="arm")
        if kind == 1:
            return replace(seen, state=torch.full((3,), float("nan")))
        if kind == 2:
            return replace(seen, stamp=replace(seen.stamp, captured=seen.stamp.captured - 0.4))
        return seen

    def apply(self, action: torch.Tensor) -> None:
        self.sent.append(action.tolist())
        self.arm.apply(action)


def faulty(contract: Contract, settings: Settings = Settings(), forward: Callable[..., torch.Tensor] | None = None) -> Session:
    # no power of two in it: seconds are what floats make of them
    clock = SimulatedClock(1000.1)
    robot = Faulty(PlanarArm(contract, clock))
    return Session(robot, Wander(), clock, lambda policy: Delayed(policy, clock, lambda request: 0.07), settings, forward)


def wandered(drive: Drive) -> None:
    """An episode, an emergency stop that is released too early and then in time, and another episode."""
    drive.warm_up()
    for number in range(150):
        drive.step()
        if number == 60:
            drive.trip("somebody is near")
            with pytest.raises(SafetyError, match="no reset before"):
                drive.release()
        if number == 90:
            drive.release()
        if number == 110:
            drive.reset()
    drive.settle()


@pytest.mark.parametrize("control", ["position", "velocity"])
def test_the_replay_sends_the_same_commands_bit_for_bit(control: str, tmp_path: Path) -> None:
    settings = Settings(Pace(expert=5, warm_up=2, seed=9), "ensemble")
    session = faulty(planar_contract(control), settings)
    with Recording(tmp_path / "run") as recording:
        drive = recording.drive(session)
        wandered(drive)
    replay = Replay(tmp_path / "run")
    replayed = replay.run()
    assert isinstance(session.robot, Faulty) and replay.contract == session.robot.contract
    assert replayed == Replayed(len(session.robot.sent), "", drive.report()) and replayed.identical and replayed.commands > 100
    report = replayed.report
    assert min(report.failed, report.refused_chunks, report.stale_rate, report.held_rate, report.changed_rate) > 0


def test_recording_changes_nothing(tmp_path: Path) -> None:
    plain, taped = faulty(planar_contract("position")), faulty(planar_contract("position"))
    wandered(plain.drive())
    with Recording(tmp_path / "run", "sqlite3") as recording:
        wandered(recording.drive(taped))
    assert isinstance(plain.robot, Faulty) and isinstance(taped.robot, Faulty) and plain.robot.sent == taped.robot.sent
    assert Replay(tmp_path / "run").run().identical


def test_a_loop_in_real_time_beside_a_thread_is_replayed_too(tmp_path: Path) -> None:
    """The machine's clock, and a policy whose answers come whenever its thread is done."""

    @dataclass
    class Slow(Wander):
        def __call__(self, request: Request) -> ActionChunk:
            time.sleep(0.013)
            return Wander.__call__(self, request)

    clock = SimulatedClock()
    contract = replace(planar_contract("position", 100.0), timing=Timing(stale=10.0, watchdog=10.0))

    @dataclass
    class Real(Faulty):
        def observe(self) -> Observation:
            clock.passed = time.monotonic()
            return self.arm.observe()

    session = Session(Real(PlanarArm(contract, clock)), Slow(), SystemClock(), settings=Settings(Pace(expert=4)))
    with Recording(tmp_path / "run") as recording:
        drive = recording.drive(session)
        drive.warm_up()
        for _ in range(80):
            drive.step()
        drive.settle()
    replayed = Replay(tmp_path / "run").run()
    assert replayed.identical and replayed.report == drive.report() and replayed.report.requests > 3


def test_the_policy_asked_again_must_answer_the_same(tmp_path: Path) -> None:
    with Recording(tmp_path / "run") as recording:
        wandered(recording.drive(faulty(planar_contract("position"))))
    assert Replay(tmp_path / "run", Wander()).run().identical

    @dataclass
    class Other(Wander):
        def __call__(self, request: Request) -> ActionChunk:
            chunk = Wander.__call__(self, request)
            nudged = chunk.actions + 1e-3 if request.observation.stamp.request == 6 else chunk.actions
            return replace(chunk, actions=nudged)

    replayed = Replay(tmp_path / "run", Other()).run()
    assert "request 6: the policy answers otherwise than recorded, by 0.001" in replayed.difference and 0 < replayed.commands < 100


def test_a_tape_that_was_tampered_with_is_found_out_at_the_first_difference(tmp_path: Path) -> None:
    with Recording(tmp_path / "run") as recording:
        wandered(recording.drive(faulty(planar_contract("position"))))
    lines = [message.data for topic, _, message in read_bag(tmp_path / "run") if topic == "/mmsdk/tape"]
    events = [json.loads(line) for line in lines]

    def replayed(name: str) -> Replayed:
        with BagWriter(tmp_path / name) as bag:
            pictures = iter(read_bag(tmp_path / "run"))
            for topic, when, message in pictures:
                if topic.startswith("/mmsdk/camera/"):
                    bag.write(topic, _ours(message), when)
            for line in events:
                bag.write("/mmsdk/tape", String(json.dumps(line)), 2**62)
        return Replay(tmp_path / name).run()

    untouched = replayed("copy")
    assert untouched.identical
    (place, event) = [(number, event) for number, line in enumerate(events[1:], 1) for event in line if event[0] == "apply"][40]
    event[1][2] = torch.nextafter(torch.tensor(event[1][2], dtype=torch.float64), torch.tensor(9.0, dtype=torch.float64)).item()
    found = replayed("nudged")
    assert found.difference.startswith("command 41: [") and found.commands == 40
    events[place].insert(1, ["sleep", 0.5])
    assert "recorded is sleep" in replayed("inserted").difference


def _ours(message: Any) -> Message:
    header = Header(Time(message.header.stamp.sec, message.header.stamp.nanosec), message.header.frame_id)
    fields = (message.height, message.width, message.encoding, message.is_bigendian, message.step)
    return Image(header, *fields, message.data.tobytes())


def test_a_workspace_needs_its_kinematics_again(tmp_path: Path) -> None:
    box = Workspace((-0.6, -0.2, -0.1), (0.6, 0.65, 0.1))
    session = faulty(planar_contract("position", workspace=box), forward=tool)
    with Recording(tmp_path / "run") as recording:
        wandered(recording.drive(session))
    with pytest.raises(ModelError, match="pass the robot's forward kinematics"):
        Replay(tmp_path / "run").run()
    assert Replay(tmp_path / "run", forward=tool).run().identical


def test_people_and_their_tools_see_pictures_states_and_commands_with_one_stamp(tmp_path: Path) -> None:
    session = faulty(planar_contract("position"))
    with Recording(tmp_path / "run") as recording:
        drive = recording.drive(session)
        wandered(drive)
        with pytest.raises(InputError, match="one recording is of one loop"):
            recording.drive(session)
    topics: dict[str, list[Any]] = {}
    for topic, _, message in read_bag(tmp_path / "run"):
        topics.setdefault(topic, []).append(message)
    assert topics.keys() == {"/mmsdk/tape", "/mmsdk/state", "/mmsdk/command", "/mmsdk/camera/side"}
    command = topics["/mmsdk/command"][-1]
    assert isinstance(session.robot, Faulty) and list(command.position) == session.robot.sent[-1]
    assert list(command.name) == ["joints[0]", "joints[1]", "joints[2]"]
    stamps = {(message.header.stamp.sec, message.header.stamp.nanosec) for message in topics["/mmsdk/state"]}
    assert (command.header.stamp.sec, command.header.stamp.nanosec) in stamps
    # the arm at rest looks the same: its picture is there once
    assert 1 < len(topics["/mmsdk/camera/side"]) < len(topics["/mmsdk/state"])


def test_an_answer_that_no_loop_takes_is_recorded_as_one(tmp_path: Path) -> None:
    class Whole(Wander):
        def __call__(self, request: Request) -> ActionChunk:
            chunk = ActionChunk(torch.ones(12, 3), request.observation.stamp)
            object.__setattr__(chunk, "actions", torch.ones(12, 3, dtype=torch.int64))
            return super().__call__(request) if self.asked < 2 else chunk

    session = replace(faulty(planar_contract("position")), policy=Whole())
    with Recording(tmp_path / "bag") as recording:
        drive = recording.drive(session)
        drive.warm_up()
        for _ in range(40):
            drive.step()
        drive.settle()
    assert drive.report().refused_chunks > 0
    for policy in (None, Whole()):
        replayed = Replay(tmp_path / "bag", policy).run()
        assert replayed.identical and replayed.commands > 20, replayed.difference


@pytest.mark.parametrize("storage", ["mcap", "sqlite3"])
def test_whatever_is_damaged_in_a_bag_is_told(storage: Storage, tmp_path: Path) -> None:
    with BagWriter(tmp_path / "bag", storage) as bag:
        for number in range(20):
            bag.write("/joints", JointState(Header(Time(1 + number, 0)), ("a", "b"), (0.5, float(number))), number + 1)
    (file,) = (tmp_path / "bag").glob("bag.*")
    whole, generator, refused = file.read_bytes(), random.Random(0), 0
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(20):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        file.write_bytes(damaged)
        try:
            list(read_bag(tmp_path / "bag"))
        except InputError:
            refused += 1
    assert refused > 20


def test_what_is_no_recording_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no bag that can be read"):
        Tape(tmp_path / "nothing")
    for name, text in (("other", "hello"), ("format", '{"format": "tape 0"}'), ("list", "[1]")):
        with BagWriter(tmp_path / name) as bag:
            bag.write("/mmsdk/tape", String(text), 1)
        with pytest.raises(InputError, match="is no recording of a loop"):
            Tape(tmp_path / name)
    with pytest.raises(InputError, match="no bag can be made there"):
        Recording(tmp_path / "other")
    header = '{"format": "mmsdk tape 1", "contract": "name: x", "settings": {}}'
    with BagWriter(tmp_path / "contract") as bag:
        bag.write("/mmsdk/tape", String(header), 1)
    with pytest.raises(InputError, match="missing"):
        Tape(tmp_path / "contract")
