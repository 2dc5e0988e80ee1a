"""Recording: a control loop runs as it would, and everything that reaches it or leaves it is written into a rosbag2.

with Recording(Path("run1")) as recording:
    drive = recording.drive(session)
    drive.warm_up()
    ...

The bag holds, in the order of their happening: /mmsdk/tape, what the loop was told, event by event (`mmsdk.vla.record.events`), which is
what replay goes by; /mmsdk/camera/<name>, the pictures that it was told of, upright and RGB; and for people and their tools /mmsdk/state
and /mmsdk/command as joint states, whose `position` holds the contract's numbers in its own units. Picture, state and command of one tick
carry the stamp of the observation.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from json import dumps
from pathlib import Path
from threading import Lock
from types import TracebackType

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk import __version__
from mmsdk.errors import InputError
from mmsdk.vision.types import Image
from mmsdk.vla.clock import Clock
from mmsdk.vla.contract import Contract
from mmsdk.vla.contract_file import contract_text
from mmsdk.vla.drive import Act, Drive, Session
from mmsdk.vla.record.events import Event, written_answer, written_events, written_observation
from mmsdk.vla.ros.bag import BagWriter, Storage
from mmsdk.vla.ros.image import image_message
from mmsdk.vla.ros.messages import Header, JointState, Message, String, Time
from mmsdk.vla.ros.stamps import SECOND, time_of
from mmsdk.vla.types import Observation, Request, Robot
from mmsdk.vla.worker import Answer, Worker

__all__ = ["CAMERA", "COMMAND", "FORMAT", "STATE", "TAPE", "Recording"]

FORMAT = "mmsdk tape 1"
TAPE, CAMERA, STATE, COMMAND = "/mmsdk/tape", "/mmsdk/camera/", "/mmsdk/state", "/mmsdk/command"
_LATEST = 2**31


class Recording:
    """A bag in the making, of one loop. It is whole once closed; whatever was recorded until then is in it."""

    def __init__(self, path: Path, storage: Storage = "mcap") -> None:
        """A new bag at `path`. Raises InputError where there is something already."""
        self._bag = BagWriter(path, storage)
        self._lock = Lock()
        self._events: list[Event] = []
        self._pictures: dict[str, tuple[int, Image]] = {}
        self._count = 0
        self._seen = Time()
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def drive(self, session: Session) -> Drive:
        """The session's loop, recorded from its beginning. Raises as `Session.loop` does, and InputError for a second loop."""
        if self._names != ((), ()):
            raise InputError("one recording is of one loop", item=str(self._bag.path))
        contract = session.robot.contract
        self._names = _names(contract)
        told = {"format": FORMAT, "mmsdk": __version__, "contract": contract_text(contract), "settings": asdict(session.settings)}
        self._write(TAPE, String(dumps(told)))
        taped = replace(
            session,
            robot=_Robot(session.robot, self),
            clock=_Clock(session.clock, self),
            worker=lambda policy: _Worker(session.worker(policy), self),
        )
        return Drive(taped.loop(), session.clock, self._act)

    def close(self) -> None:
        """Finish the bag."""
        self._flush()
        self._bag.close()

    def tell(self, event: Event) -> None:
        """Put an event on the tape; from any thread."""
        with self._lock:
            self._events.append(event)

    def seen(self, observation: Observation) -> None:
        """Put an observation on the tape, and what is new of it beside it."""
        self._seen = _stamp(observation.stamp.captured)
        numbers = {name: self._picture(name, image) for name, image in observation.images.items()}
        state = tuple(observation.state.double().tolist())
        # as many names as numbers, also where a robot tells another number of them than its contract
        self._write(STATE, JointState(Header(self._seen), _fitted(self._names[0], len(state)), state))
        self.tell(["seen", written_observation(observation, numbers)])

    def sent(self, action: Float[Tensor, " a"]) -> None:
        """Put a command on the tape, and beside it."""
        numbers = action.tolist()
        self.tell(["apply", numbers])
        self._write(COMMAND, JointState(Header(self._seen), self._names[1], tuple(numbers)))

    def _act(self, act: Act) -> None:
        if act.kind != "trip":
            self._flush()
        self.tell(["act", act.kind, act.reason, act.at])

    def _picture(self, name: str, image: Image) -> int:
        """The number of a picture; the very same one is written once."""
        held = self._pictures.get(name)
        if held is not None and (held[1] is image or torch.equal(held[1].pixels, image.pixels)):
            return held[0]
        self._count += 1
        self._pictures[name] = self._count, image
        pixels = image.pixels.permute(1, 2, 0).contiguous().numpy()
        self._write(CAMERA + _plain(name), image_message(pixels, "rgb8", Header(self._seen, f"{self._count} {name}")))
        return self._count

    def _flush(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        if events:
            self._write(TAPE, String(written_events(events)))

    def _write(self, topic: str, message: Message) -> None:
        self._bag.write(topic, message, time.time_ns())


@dataclass(frozen=True, slots=True)
class _Robot:
    """A `Robot` that is listened to."""

    robot: Robot
    tape: Recording

    @property
    def contract(self) -> Contract:
        return self.robot.contract

    def observe(self) -> Observation:
        try:
            observation = self.robot.observe()
        except InputError as error:
            self.tape.tell(["unseen", error.message, error.item])
            raise
        self.tape.seen(observation)
        return observation

    def apply(self, action: Float[Tensor, " a"]) -> None:
        # before it is sent: what a robot refuses was sent all the same
        self.tape.sent(action)
        self.robot.apply(action)


@dataclass(frozen=True, slots=True)
class _Clock:
    """A `Clock` that is listened to."""

    clock: Clock
    tape: Recording

    def now(self) -> float:
        reading = self.clock.now()
        self.tape.tell(["now", reading])
        return reading

    def sleep(self, seconds: float) -> None:
        self.tape.tell(["sleep", seconds])
        self.clock.sleep(seconds)


@dataclass(slots=True)
class _Worker:
    """A `Worker` that is listened to."""

    worker: Worker
    tape: Recording
    told: bool = False

    @property
    def busy(self) -> bool:
        busy = self.worker.busy
        if busy != self.told:
            self.tape.tell(["busy", busy])
            self.told = busy
        return busy

    def reset(self, episode: int) -> None:
        self.tape.tell(["reset", episode])
        self.worker.reset(episode)

    def submit(self, request: Request) -> None:
        self.tape.tell(["submit", request.observation.stamp.request])
        self.worker.submit(request)

    def collect(self) -> list[Answer]:
        answers = self.worker.collect()
        self.tape.tell(["collect", [written_answer(answer) for answer in answers]])
        return answers


def _names(contract: Contract) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A name for every number of a state, and of an action."""
    state = tuple(f"{feature.name}[{place}]" for feature in contract.state for place in range(feature.size))
    return state, tuple(f"{command.feature.name}[{place}]" for command, place, _ in contract.each_command())


def _fitted(names: Sequence[str], count: int) -> tuple[str, ...]:
    return tuple(names[:count]) + tuple(f"[{place}]" for place in range(len(names), count))


def _plain(name: str) -> str:
    """A camera's name as part of a topic's, which knows fewer letters."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name)


def _stamp(moment: float) -> Time:
    """A moment as a stamp; 0 where a clock that has jumped tells what fits into none."""
    return time_of(round(moment * SECOND)) if 0 <= moment < _LATEST else Time()
