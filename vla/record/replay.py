"""Replay: a recorded loop once more, by the same code, told the same things in the same order; it must send the same commands, bit for bit.

print(Replay(Path("run1")).run())

The clock is the recorded one, reading by reading, and so are observations and answers; but the policy may be asked again instead. The first
thing that the loop asks for and that was not recorded there ends the replay and is told: another version of the loop, or another policy.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError, ModelError, SafetyError
from mmsdk.vision.types import Image
from mmsdk.vla.accounting import LoopReport
from mmsdk.vla.contract import Contract
from mmsdk.vla.contract_file import parse_contract
from mmsdk.vla.drive import Drive, Session, Settings
from mmsdk.vla.gate import Forward
from mmsdk.vla.loop import Pace
from mmsdk.vla.record.events import Event, EventKind, read_answer, read_events, read_observation
from mmsdk.vla.record.recorder import CAMERA, FORMAT, TAPE
from mmsdk.vla.ros.bag import read_bag
from mmsdk.vla.ros.image import picture_of
from mmsdk.vla.ros.protocols import AnyImage, AnyString
from mmsdk.vla.types import ActionChunk, Observation, Policy, Request
from mmsdk.vla.worker import Answer, Threaded

__all__ = ["Replay", "Replayed", "Tape"]


@dataclass(frozen=True, slots=True)
class Replayed:
    """How many commands were the same as recorded, "" or what was not, whether there was more on the tape, and the loop's own report."""

    commands: int
    difference: str
    report: LoopReport

    @property
    def identical(self) -> bool:
        """Whether the whole recording was gone through, every command the same."""
        return not self.difference


class _EndError(Exception):
    """The tape is at its end."""


class _DifferenceError(Exception):
    """The loop asks for something else than it did."""


class Tape:
    """A recording, from its beginning: what the loop was made of, and what it was told, event by event."""

    def __init__(self, path: Path) -> None:
        """Raises InputError for what is no recording of ours, or cannot be read."""
        self.path = path
        self.pictures: dict[int, Image] = {}
        self._events = self._read(read_bag(path))
        told = next(self._events, None)
        if not isinstance(told, dict) or told.get("format") != FORMAT:
            raise InputError(f"is no recording of a loop: expected {FORMAT!r} on {TAPE}", item=str(path))
        self.contract: Contract = parse_contract(str(told.get("contract")), str(path))
        self.settings = _settings(told.get("settings"), str(path))

    def __iter__(self) -> Iterator[Event]:
        for event in self._events:
            assert isinstance(event, list), "only the first is none"
            yield event

    def _read(self, messages: Iterator[tuple[str, int, object]]) -> Iterator[Event | dict[str, Any]]:
        begun = False
        for topic, _, message in messages:
            if topic.startswith(CAMERA) and isinstance(message, AnyImage):
                self._picture(message)
            elif topic == TAPE and isinstance(message, AnyString):
                if begun:
                    yield from read_events(message.data, str(self.path))
                else:
                    begun = True
                    yield _header(message.data)

    def _picture(self, message: AnyImage) -> None:
        number, _, name = message.header.frame_id.partition(" ")
        if not number.isdigit():
            raise InputError(f"a picture without a number: {message.header.frame_id[:40]!r}", item=str(self.path))
        pixels = np.array(picture_of(message, item=name).transpose(2, 0, 1), order="C")
        self.pictures[int(number)] = Image(torch.from_numpy(pixels), name)

    def observation(self, told: dict[str, Any]) -> Observation:
        """The observation of a "seen" event; of each camera, the pictures before it are asked for no more."""
        observation = read_observation(told, self.pictures)
        for name, newest in told["pictures"].items():
            for number in [number for number, image in self.pictures.items() if image.source == name and number < newest]:
                del self.pictures[number]
        return observation


class Replay:
    """One replay of one recording: the loop's robot, its clock and its worker, all in one."""

    def __init__(self, path: Path, policy: Policy | None = None, forward: Forward | None = None) -> None:
        """With a `policy` it is asked again, and must give the recorded answers; `forward` are the kinematics, for a workspace.

        Raises as `Tape` does.
        """
        self._tape = Tape(path)
        self._events = iter(self._tape)
        self._held: Event | None = None
        self._busy = False
        self._again = None if policy is None else Threaded(policy)
        self._forward = forward
        self._commands = self._number = 0
        self._drive: Drive | None = None

    @property
    def contract(self) -> Contract:
        """See `Robot`."""
        return self._tape.contract

    def run(self) -> Replayed:
        """Go through it. Raises ModelError for a workspace without `forward`, InputError where the tape is damaged."""
        session = Session(self, _Silent(), self, lambda policy: self, self._tape.settings, self._forward)
        difference = ""
        drive = self._drive = session.drive()
        try:
            while True:
                self._do(drive, self._next("act"))
        except _EndError:
            pass
        except _DifferenceError as found:
            difference = str(found)
        return Replayed(self._commands, difference, drive.report())

    def _do(self, drive: Drive, act: Event) -> None:
        acts = {"warm_up": drive.warm_up, "step": drive.step, "settle": drive.settle, "reset": drive.reset, "release": drive.release}
        if act[1] not in acts:
            raise InputError(f"holds an act that is none: {act[1]!r}", item=str(self._tape.path))
        try:
            acts[act[1]]()
        except (ModelError, SafetyError):
            # as it was: whether the program went on is on the tape
            return

    def _next(self, *kinds: EventKind) -> Event:
        """The next event, which must be of one of these kinds."""
        self._catch_up()
        event, self._held = self._held, None
        if event is None:
            raise _EndError
        if event[0] not in kinds:
            raise _DifferenceError(f"event {self._number}: the loop does {' or '.join(kinds)}, recorded is {event[0]}")
        return event

    def _catch_up(self) -> None:
        """Do what happened beside the loop before its next event: the stop was tripped, the policy was done."""
        while self._held is None:
            event = next(self._events, None)
            if event is None:
                return
            self._number += 1
            if event[0] == "busy":
                self._busy = bool(event[1])
            elif event[:2] == ["act", "trip"] and self._drive is not None:
                self._drive.loop.estop.trip(str(event[2]), float(event[3]))
            else:
                self._held = event

    def now(self) -> float:
        """See `Clock`."""
        return float(self._next("now")[1])

    def sleep(self, seconds: float) -> None:
        """See `Clock`: no time passes."""
        self._same("sleep", seconds, self._next("sleep")[1])

    def observe(self) -> Observation:
        """See `Robot`."""
        event = self._next("seen", "unseen")
        if event[0] == "unseen":
            raise InputError(event[1], item=event[2])
        return self._tape.observation(event[1])

    def apply(self, action: Float[Tensor, " a"]) -> None:
        """See `Robot`: nothing moves, the command is compared."""
        recorded = self._next("apply")[1]
        sent = action.tolist()
        if [number.hex() for number in map(float, sent)] != [number.hex() for number in map(float, recorded)]:
            raise _DifferenceError(f"command {self._commands + 1}: {sent}, recorded is {recorded}")
        self._commands += 1

    @property
    def busy(self) -> bool:
        """See `Worker`."""
        self._catch_up()
        return self._busy

    def reset(self, episode: int) -> None:
        """See `Worker`."""
        self._same("reset", episode, self._next("reset")[1])
        if self._again is not None:
            self._again.reset(episode)

    def submit(self, request: Request) -> None:
        """See `Worker`."""
        self._same("submit", request.observation.stamp.request, self._next("submit")[1])
        if self._again is not None:
            # an answer that came too late for anybody is not waited for by the loop
            self._again.finish()
            self._again.submit(request)

    def collect(self) -> list[Answer]:
        """See `Worker`."""
        answers = [read_answer(told) for told in self._next("collect")[1]]
        if self._again is not None and answers:
            for recorded, mine in zip(answers, self._again.finish(), strict=True):
                _compare(recorded, mine)
        return answers

    def _same(self, what: str, mine: object, recorded: object) -> None:
        if mine != recorded:
            raise _DifferenceError(f"event {self._number}: {what} {mine!r}, recorded is {recorded!r}")


@dataclass(frozen=True, slots=True)
class _Silent:
    """The policy in a loop whose worker is a recording: it is never asked."""

    def reset(self, episode: int) -> None:
        raise ModelError("the worker answers for the policy")

    def __call__(self, request: Request) -> ActionChunk:
        raise ModelError("the worker answers for the policy")


def _compare(recorded: Answer, mine: Answer) -> None:
    """Raises _DifferenceError where a policy that was asked again answers otherwise; what it raises must be of the same name."""
    told = f"request {recorded.request}: the policy answers otherwise than recorded"
    if not isinstance(recorded.result, ActionChunk) or not isinstance(mine.result, ActionChunk):
        names = [type(answer.result).__name__ for answer in (mine, recorded)]
        if names[0] != names[1]:
            raise _DifferenceError(f"{told}: {names[0]}, recorded is {names[1]}")
        return
    actions, wanted = mine.result.actions.detach().cpu(), recorded.result.actions
    if actions.shape != wanted.shape:
        raise _DifferenceError(f"{told}: {tuple(actions.shape)} numbers, recorded are {tuple(wanted.shape)}")
    # NaN is the same as NaN here
    if not torch.equal(actions.nan_to_num(), wanted.nan_to_num()) or not torch.equal(actions.isnan(), wanted.isnan()):
        raise _DifferenceError(f"{told}, by {float((actions.double() - wanted.double()).abs().max()):.3g}")


def _header(text: str) -> dict[str, Any]:
    try:
        told = loads(text)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _settings(told: object, item: str) -> Settings:
    if not isinstance(told, dict) or not isinstance(told.get("pace"), dict):
        raise InputError("does not say how its loop ran", item=item)
    try:
        return Settings(Pace(**told["pace"]), told["plan"], told["on_violation"])
    except (TypeError, KeyError) as error:
        raise InputError(f"says of its loop what is not known: {error}", item=item) from None
