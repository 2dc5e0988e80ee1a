"""What a server offers: a policy, the robot that it is for, and under which keys a message holds the robot's pictures and state."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from mmsdk import __version__
from mmsdk.errors import InputError, WireError
from mmsdk.vla.contract import Contract
from mmsdk.vla.types import Policy

__all__ = ["PROTOCOL", "Keys", "Offer", "Service", "difference"]

PROTOCOL = 1
_BESIDE_PICTURES = 2**20


@dataclass(frozen=True, slots=True)
class Keys:
    """The paths of a message's values, where they are not what openpi's data sets call them.

    A camera of the contract is found under "observation/<name>", the state under "observation/state" or, feature by feature, under
    "observation/<name>". `ignored` are paths that clients may send and that mean nothing here.
    """

    cameras: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[str, str] = field(default_factory=dict)
    state: str = "observation/state"
    prompt: str = "prompt"
    ignored: frozenset[str] = frozenset()

    def camera(self, name: str) -> str:
        """Where the frames of a camera are found."""
        return self.cameras.get(name, f"observation/{name}")

    def feature(self, name: str) -> str:
        """Where a feature of the state is found."""
        return self.features.get(name, f"observation/{name}")


@dataclass(frozen=True, slots=True)
class Service:
    """A policy for a robot, as a server offers it.

    `session` gives a policy for one connection: weights are shared between them, memory is not; a policy without a memory may be the
    same for all. `contract` is the robot's, in whose names, units and raw frames requests come. `noise` is the shape, actions x numbers,
    of what the policy's sampling starts from and a request may bring; (0, 0): it takes none.
    """

    contract: Contract
    session: Callable[[], Policy]
    keys: Keys = Keys()
    noise: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        known = {camera.name for camera in self.contract.cameras} | {feature.name for feature in self.contract.state}
        unknown = sorted((self.keys.cameras.keys() | self.keys.features.keys()) - known)
        paths = [*map(self.keys.camera, (camera.name for camera in self.contract.cameras)), self.keys.state, self.keys.prompt]
        if len(set(paths)) != len(paths):
            raise InputError(f"one key means two things: {', '.join(paths)}", item=self.contract.name)
        if unknown:
            raise InputError(f"there are keys for {', '.join(unknown)}, the robot has {', '.join(sorted(known))}", item=self.contract.name)

    @property
    def largest(self) -> int:
        """The most bytes that a request may have: the frames of all cameras, and a mebibyte for all else."""
        return sum(camera.height * camera.width * 3 for camera in self.contract.cameras) + _BESIDE_PICTURES

    def told(self) -> dict[str, object]:
        """The first message of every connection."""
        keys = {"cameras": {camera.name: self.keys.camera(camera.name) for camera in self.contract.cameras}}
        return {
            "mmsdk": {"protocol": PROTOCOL, "version": __version__},
            "contract": asdict(self.contract),
            "keys": {**keys, "state": self.keys.state, "prompt": self.keys.prompt},
            "noise": self.noise,
            "largest": self.largest,
        }


@dataclass(frozen=True, slots=True)
class Offer:
    """What a client has been told, as far as it needs it."""

    keys: Keys
    largest: int

    @classmethod
    def of(cls, message: Mapping[str, object], contract: Contract) -> "Offer":
        """Raises WireError where no server of ours is talking, InputError where its policy is for another robot than this contract's."""
        about, keys, largest = message.get("mmsdk"), message.get("keys"), message.get("largest")
        if not isinstance(about, dict) or about.get("protocol") != PROTOCOL:
            raise WireError(f"it speaks another protocol than mmsdk's number {PROTOCOL}: {str(about)[:80]}")
        if not (isinstance(keys, dict) and isinstance(largest, int)):
            raise WireError("its first message has no keys, or no largest size")
        differs = difference(asdict(contract), message.get("contract"), "contract")
        if differs:
            raise InputError(f"the server's policy is for another robot: {differs}", item=contract.name)
        cameras, state, prompt = keys.get("cameras"), keys.get("state"), keys.get("prompt")
        texts = [state, prompt, *cameras.values()] if isinstance(cameras, dict) else [None]
        if not (isinstance(cameras, dict) and all(isinstance(text, str) for text in texts)):
            raise WireError("its keys are no texts")
        return cls(Keys(cameras, state=str(state), prompt=str(prompt)), largest)


def difference(mine: object, theirs: object, place: str) -> str:
    """Where two trees of values first differ, "" where they do not. A tuple is equal to the list that a wire makes of it."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        if mine.keys() != theirs.keys():
            return f"{place} has {', '.join(map(str, theirs))}, expected {', '.join(map(str, mine))}"
        found = (difference(mine[key], theirs[key], f"{place}.{key}") for key in mine)
    elif isinstance(mine, list | tuple) and isinstance(theirs, list | tuple) and len(mine) == len(theirs):
        found = (difference(one, other, f"{place}[{index}]") for index, (one, other) in enumerate(zip(mine, theirs, strict=True)))
    else:
        return "" if mine == theirs else f"{place} is {repr(theirs)[:80]}, expected {mine!r}"
    return next((told for told in found if told), "")
