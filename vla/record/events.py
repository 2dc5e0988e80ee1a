"""What passes between a control loop and everything around it, one event after the other, in JSON and to the last bit.

An event is a list: its kind, then what was told. A loop does nothing but ask for these, so what it does again follows from them.

["act", kind, reason, at]   a program lets the loop do something (`mmsdk.vla.drive.Act`)
["now", t]  ["sleep", s]    the clock's reading, in seconds, and a sleep
["seen", observation]  ["unseen", message, item]    what the robot told of itself, or why nothing
["apply", numbers]          a command, as it was sent
["reset", episode]  ["submit", request]  ["collect", answers]    the policy's worker
["busy", yes]               that worker is busy, or is no longer: told once, when it is found out

Floats are written as Python writes them, the shortest text that reads as the same number; infinity and NaN as Infinity and NaN.
"""

import json
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any, Literal

import torch
from jaxtyping import Shaped
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vision.types import Image
from mmsdk.vla.chunk_check import readable
from mmsdk.vla.types import ActionChunk, Observation, Stamp
from mmsdk.vla.worker import Answer

__all__ = [
    "Event",
    "EventKind",
    "read_answer",
    "read_events",
    "read_observation",
    "written_answer",
    "written_events",
    "written_observation",
]

EventKind = Literal["act", "now", "sleep", "seen", "unseen", "apply", "reset", "submit", "busy", "collect"]
Event = list[Any]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


def written_events(events: list[Event]) -> str:
    """Events as a line of text."""
    return json.dumps(events, separators=(",", ":"))


def read_events(text: str, item: str = "recording") -> list[Event]:
    """Events from such a line. Raises InputError for what is none."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"holds what are no events: {error}", item=item) from None
    if not isinstance(found, list) or not all(isinstance(event, list) and event and isinstance(event[0], str) for event in found):
        raise InputError(f"holds what are no events: {text[:80]!r}", item=item)
    return found


def written_observation(seen: Observation, pictures: Mapping[str, int]) -> dict[str, Any]:
    """An observation, whose pictures are written elsewhere under these numbers."""
    return {
        "pictures": dict(pictures),
        "state": _written(seen.state),
        "instruction": seen.instruction,
        "stamp": astuple(seen.stamp),
        "captured": dict(seen.captured),
    }


def read_observation(told: Mapping[str, Any], pictures: Mapping[int, Image]) -> Observation:
    """The same observation. Raises InputError where it is none, or a picture is missing."""
    try:
        images = {str(name): pictures[number] for name, number in told["pictures"].items()}
        captured = {str(name): float(moment) for name, moment in told["captured"].items()}
        return Observation(images, _read(told["state"]), str(told["instruction"]), Stamp(*told["stamp"]), captured)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise InputError(f"holds an observation that is none: {error!r}", item="recording") from None


def written_answer(answer: Answer) -> dict[str, Any]:
    """What a worker handed back: a chunk, or the name and the words of what was raised, or of what is no chunk that any loop takes."""
    result = answer.result
    if not isinstance(result, ActionChunk) or not readable(result.actions):
        return {"request": answer.request, "raised": [type(result).__name__, str(result)]}
    stamp, actions = astuple(result.stamp), _written(result.actions)
    return {"request": answer.request, "actions": actions, "stamp": stamp, "producer": result.producer}


def read_answer(told: Mapping[str, Any]) -> Answer:
    """The same answer; of an exception the name and the words, which is all that a loop looks at. Raises InputError where it is none."""
    try:
        if "raised" in told:
            name, words = told["raised"]
            return Answer(int(told["request"]), type(str(name), (Exception,), {})(words))
        chunk = ActionChunk(_read(told["actions"]), Stamp(*told["stamp"]), str(told["producer"]))
        return Answer(int(told["request"]), chunk)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"holds an answer that is none: {error!r}", item="recording") from None


def _written(values: Shaped[Tensor, "..."]) -> dict[str, Any]:
    kind = str(values.dtype).removeprefix("torch.")
    if kind not in _DTYPES:
        raise InputError(f"numbers of {kind} are not recorded; there is {', '.join(_DTYPES)}", item="recording")
    return {"dtype": kind, "shape": list(values.shape), "values": values.detach().cpu().flatten().tolist()}


def _read(told: Mapping[str, Any]) -> Shaped[Tensor, "..."]:
    return torch.tensor(told["values"], dtype=_DTYPES[told["dtype"]]).reshape(told["shape"])
