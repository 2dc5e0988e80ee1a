"""What is said over the wire: requests, answers and errors, in openpi's words and, under "mmsdk/", in our own.

A request needs no word of ours: then it is about this very moment, has no deadline, and carries the seed n if it is the n-th of its
connection, as in the loop. An error is a frame of text, which openpi's client raises: {"error": {"type", "message", "item"}, "request"}.
docs/robot_server.md lists every key.
"""

import json
from dataclasses import dataclass
from math import inf

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError, MmsdkError, ModelError, PluginError, SafetyError, WireError
from mmsdk.vision.types import Image
from mmsdk.vla.camera import shown, upright
from mmsdk.vla.contract import Camera, Contract
from mmsdk.vla.types import ActionChunk, Effort, Observation, Request, Stamp
from mmsdk.vla.wire.codec import Array, decode, encode
from mmsdk.vla.wire.fields import Fields
from mmsdk.vla.wire.service import Keys, Service

__all__ = ["Asked", "Reply", "read_error", "read_reply", "read_request", "write_error", "write_reply", "write_request"]

_KINDS: tuple[type[MmsdkError], ...] = (InputError, ModelError, PluginError, SafetyError, WireError)
_PARTS = frozenset({"vlm", "adapter", "expert"})


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it travels. `number` is the client's own, given back with the answer; 0: it gave none.

    `budget` are the seconds within which an answer is of use, counted from its arrival: clocks differ, durations do not. `resets` counts
    how often the client's policy was reset.
    """

    number: int
    request: Request
    budget: float = inf
    resets: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """The actions for request `number`, who made them, and the seconds that making them took."""

    number: int
    actions: Float[Tensor, "h a"]
    producer: str
    inference: float


def write_request(asked: Asked, contract: Contract, keys: Keys) -> bytes:
    """A request as bytes. Raises InputError for a camera that is missing, unknown or of another size than the contract's."""
    request, observation = asked.request, asked.request.observation
    stamp, known = observation.stamp, [camera.name for camera in contract.cameras]
    if set(known) != set(observation.images):
        told = ", ".join(observation.images) or "none"
        raise InputError(f"pictures of {told}; the robot has {', '.join(known) or 'none'}", item=contract.name)
    message: dict[str, object] = {keys.camera(camera.name): _frame(camera, observation.images[camera.name]) for camera in contract.cameras}
    message |= {keys.state: _array(observation.state), keys.prompt: observation.instruction}
    message |= {
        "mmsdk/request": asked.number,
        "mmsdk/budget": asked.budget,
        "mmsdk/resets": asked.resets,
        "mmsdk/seed": stamp.seed,
        "mmsdk/stamp": {"captured": stamp.captured, "episode": stamp.episode, "request": stamp.request, "deadline": stamp.deadline},
        "mmsdk/captured": dict(observation.captured),
        "mmsdk/pending": _array(request.pending),
        "mmsdk/delay": request.delay,
        "mmsdk/effort": int(request.effort),
        "mmsdk/due": sorted(request.due),
    }
    if request.noise.shape[0]:
        message["mmsdk/noise"] = _array(request.noise)
    return encode(message)


def read_request(fields: Fields, number: int, service: Service, now: float, count: int) -> Asked:
    """The request in a message: the `count`-th of its connection, arrived at `now` of the server's clock.

    Raises InputError, naming the key, for what is missing, of a wrong kind or size, not finite, or not known.
    """
    contract, keys = service.contract, service.keys
    images = {camera.name: upright(camera, fields.array(keys.camera(camera.name))) for camera in contract.cameras}
    stamp = Stamp(
        fields.number("mmsdk/stamp/captured", now),
        fields.whole("mmsdk/stamp/episode", 0),
        fields.whole("mmsdk/stamp/request", count),
        fields.number("mmsdk/stamp/deadline", inf),
        fields.whole("mmsdk/seed", count),
    )
    observation = Observation(images, _state(fields, contract, keys), fields.text(keys.prompt), stamp, fields.under("mmsdk/captured/"))
    request = Request(
        observation,
        fields.matrix("mmsdk/pending", contract.action_size),
        fields.whole("mmsdk/delay", 0, least=0),
        _effort(fields.whole("mmsdk/effort", int(Effort.FULL))),
        fields.chosen("mmsdk/due", _PARTS),
        _noise(fields, service),
    )
    asked = Asked(number, request, fields.number("mmsdk/budget", inf), fields.whole("mmsdk/resets", 0))
    fields.end(keys.ignored)
    return asked


def write_reply(asked: Asked, chunk: ActionChunk, inference: float, waited: float) -> bytes:
    """An answer as bytes; its times are in seconds, and told in milliseconds.

    The actions are the only array in it: openpi's chunk broker takes row i of every array of an answer for its i-th step.
    """
    timing = {"infer_ms": inference * 1e3}
    message = {"actions": _array(chunk.actions), "policy_timing": timing, "server_timing": {**timing, "wait_ms": waited * 1e3}}
    return encode({**message, "mmsdk/request": asked.number, "mmsdk/producer": chunk.producer})


def read_reply(data: bytes) -> Reply:
    """The answer in bytes. Raises WireError for what is none."""
    try:
        fields = Fields(decode(data))
        actions = fields.array("actions")
        if actions.ndim != 2 or actions.dtype.kind != "f":
            raise InputError(f"{actions.dtype} of shape {actions.shape}, expected rows of numbers", item="actions")
        number, producer = fields.whole("mmsdk/request", 0), fields.text("mmsdk/producer")
        return Reply(number, torch.from_numpy(actions), producer, fields.number("policy_timing/infer_ms", 0.0) / 1e3)
    except InputError as error:
        raise WireError(f"the server's answer cannot be read: {error}") from None


def write_error(error: MmsdkError, number: int) -> str:
    """An error as text, for request `number` (0: not known which)."""
    item, message = (error.item, error.message) if isinstance(error, InputError) else ("", str(error))
    kind = next((kind for kind in _KINDS if isinstance(error, kind)), ModelError)
    return json.dumps({"error": {"type": kind.__name__, "message": message, "item": item}, "request": number})


def read_error(text: str) -> tuple[int, MmsdkError]:
    """The number of the request that an error is about, and the error. Raises WireError for text that tells none."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    error = told.get("error") if isinstance(told, dict) else None
    number = told.get("request") if isinstance(told, dict) else None
    if not isinstance(error, dict) or not isinstance(number, int):
        raise WireError(f"the server says {text[:200]!r}")
    kind, message = next((kind for kind in _KINDS if kind.__name__ == error.get("type")), ModelError), str(error.get("message"))
    return number, kind(message, item=str(error.get("item"))) if issubclass(kind, InputError) else kind(message)


def _frame(camera: Camera, image: Image) -> Array:
    """A picture as this camera's raw frame: the way back of `upright`."""
    if image.size != camera.upright_size:
        raise InputError(f"a picture of {image.size}, declared {camera.upright_size}", item=f"camera {camera.name}")
    planes = shown(camera, image).pixels
    return _array(planes.permute(1, 2, 0) if camera.layout == "hwc" else planes)


def _array(values: Tensor) -> Array:
    """NumPy has no bfloat16, whose values float32 holds exactly."""
    kept = values.detach().cpu()
    array: Array = (kept.float() if kept.dtype == torch.bfloat16 else kept).numpy()
    return array


def _state(fields: Fields, contract: Contract, keys: Keys) -> Float[Tensor, " p"]:
    """The state, sent whole or feature by feature."""
    if keys.state in fields:
        return fields.vector(keys.state, contract.state_size)
    parts = [fields.vector(keys.feature(feature.name), feature.size) for feature in contract.state]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _noise(fields: Fields, service: Service) -> Float[Tensor, "n w"]:
    rows, width = service.noise
    noise = fields.matrix("mmsdk/noise", width) if "mmsdk/noise" in fields else torch.zeros(0, 0)
    if noise.shape[0] not in (0, rows):
        raise InputError(f"{noise.shape[0]} rows, the policy starts from {rows} (0: it takes none)", item="mmsdk/noise")
    return noise


def _effort(value: int) -> Effort:
    if value not in set(Effort):
        raise InputError(f"{value} is none of {', '.join(f'{effort.value} ({effort.name})' for effort in Effort)}", item="mmsdk/effort")
    return Effort(value)
