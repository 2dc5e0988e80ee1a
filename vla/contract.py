"""The embodiment contract: what one robot's (or one policy's) pictures, state and actions mean, number by number.

Everything that goes wrong silently between a policy and a robot is declared here: units, ranges, order, rotation layout, polarity of the
gripper, colour order, absolute or relative actions, rates, limits. A contract that leaves one of them open does not load.
`mmsdk.vla.contract_file` reads one from YAML.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan
from typing import Literal

from mmsdk.errors import InputError
from mmsdk.vla.rotation import ROTATIONS

__all__ = ["UNITS", "Camera", "Command", "Contract", "Control", "Feature", "Kind", "Meaning", "Timing", "Workspace"]

Kind = Literal["joint", "position", "rotation", "gripper", "velocity", "effort", "other"]
Control = Literal["position", "velocity", "effort"]
Meaning = Literal["absolute", "relative", "step"]

UNITS: dict[str, tuple[str, float]] = {
    "rad": ("angle", 1.0),
    "deg": ("angle", 0.017453292519943295),
    "m": ("length", 1.0),
    "cm": ("length", 0.01),
    "mm": ("length", 0.001),
    "rad/s": ("turning", 1.0),
    "deg/s": ("turning", 0.017453292519943295),
    "m/s": ("speed", 1.0),
    "N": ("force", 1.0),
    "N m": ("torque", 1.0),
    "fraction": ("share", 1.0),
    "percent": ("share", 0.01),
    "one": ("number", 1.0),
}
"""Each unit's quantity, and how much one of it is in the quantity's own unit."""
_MOVING: dict[str, Control] = {"turning": "velocity", "speed": "velocity", "force": "effort", "torque": "effort"}
"""What a robot does as long as it holds such a value; as a position it would be held for ever."""


@dataclass(frozen=True, slots=True)
class Camera:
    """Raw frames of one camera. `turned` is how many degrees clockwise its frames stand from upright, `mirrored` whether left is right."""

    name: str
    height: int
    width: int
    colour: Literal["rgb", "bgr"]
    layout: Literal["hwc", "chw"]
    turned: Literal[0, 90, 180, 270] = 0
    mirrored: bool = False

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 1:
            raise InputError(f"{self.height} x {self.width} pixels is no size", item=f"camera {self.name}")

    @property
    def upright_size(self) -> tuple[int, int]:
        """(height, width) of its picture once upright."""
        return (self.height, self.width) if self.turned in (0, 180) else (self.width, self.height)


@dataclass(frozen=True, slots=True)
class Feature:
    """One named part of a state or an action: `size` numbers of one kind and unit, each within [low, high].

    A rotation names its `layout` and has no unit of its own but for angles; `keep_sign` says that a quaternion's sign means something to
    whoever reads it; `tool` is the turn (w, x, y, z) from the flange to the frame that it describes. A gripper says which value is `opened`
    and which `closed`, and whether it knows only these two (`binary`).
    """

    name: str
    kind: Kind
    size: int
    unit: str
    low: tuple[float, ...]
    high: tuple[float, ...]
    layout: str = ""
    keep_sign: bool = False
    tool: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    opened: float | None = None
    closed: float | None = None
    binary: bool = False

    def __post_init__(self) -> None:
        item = f"feature {self.name}"
        if self.size < 1 or len(self.low) != self.size or len(self.high) != self.size:
            raise InputError(f"size {self.size}, {len(self.low)} low and {len(self.high)} high; expected as many of each", item=item)
        if any(isnan(low) or isnan(high) or low >= high for low, high in zip(self.low, self.high, strict=True)):
            raise InputError(f"the range {self.low}..{self.high} is empty somewhere", item=item)
        if self.unit not in UNITS:
            raise InputError(f"the unit {self.unit!r} is not known; there is {', '.join(UNITS)}", item=item)
        self._check_rotation(item)
        self._check_gripper(item)

    def _check_rotation(self, item: str) -> None:
        if self.kind != "rotation":
            if self.layout:
                raise InputError(f"a {self.kind} has no rotation layout, got {self.layout!r}", item=item)
            return
        if ROTATIONS.get(self.layout) != self.size:
            told = f"layout {self.layout!r} with {self.size} numbers; a rotation declares one of"
            raise InputError(f"{told} {', '.join(f'{name} ({size})' for name, size in ROTATIONS.items())}", item=item)
        quantity = "angle" if self.layout.startswith(("euler", "axis")) else "number"
        if UNITS[self.unit][0] != quantity:
            raise InputError(f"{self.layout} in {self.unit}; angles are in rad or deg, quaternions and matrices in one", item=item)
        if not abs(sum(number * number for number in self.tool) - 1) <= 1e-6:
            raise InputError(f"tool {self.tool} is no unit quaternion w, x, y, z", item=item)

    def _check_gripper(self, item: str) -> None:
        if self.kind != "gripper":
            return
        if self.opened is None or self.closed is None or self.opened == self.closed:
            raise InputError("a gripper declares which value is opened and which closed; its polarity is never guessed", item=item)
        if not all(self.low[0] <= end <= self.high[0] for end in (self.opened, self.closed)):
            raise InputError(f"opened {self.opened} or closed {self.closed} lies outside of {self.low[0]}..{self.high[0]}", item=item)


@dataclass(frozen=True, slots=True)
class Command:
    """One part of an action: a feature, how the robot takes it, and the limits of each of its numbers.

    `control` decides what standing still is: position holds, velocity and effort go to zero. `meaning`: "absolute"; "relative" to the state
    that the policy saw; "step", what is added in this tick, whose range is then that of the step. `measured` names the state feature in
    which the robot reports the position; absolute positions cannot do without. `speed`, `acceleration` and `jerk` are of the motion, in
    its unit per s, s^2 and s^3, whether positions or velocities are commanded (of an effort only `speed` counts, the limit of its
    change). `lag` is how far the measured position may be from the commanded one before the robot counts as blocked and holds where it is
    measured; a gripper may be any distance away, for an object between its fingers keeps it there.
    """

    feature: Feature
    control: Control
    meaning: Meaning
    measured: str = ""
    speed: float = inf
    acceleration: float = inf
    jerk: float = inf
    lag: float = inf

    def __post_init__(self) -> None:
        item = f"command {self.feature.name}"
        if not all(limit > 0 for limit in (self.speed, self.acceleration, self.jerk, self.lag)):
            raise InputError("speed, acceleration, jerk and lag are numbers above 0 (.inf for none)", item=item)
        moving = _MOVING.get(UNITS[self.feature.unit][0], self.feature.kind)
        if moving in ("velocity", "effort") and moving != self.control:
            told = f"a {self.feature.kind} in {self.feature.unit} under control {self.control!r}"
            raise InputError(f"{told}: standing still would not be zero; its control is {moving!r}", item=item)
        if self.control == "position" and self.meaning != "step" and not self.measured:
            raise InputError("standing still is holding the measured position; name the state feature that measures it", item=item)
        if self.control != "position" and self.meaning != "absolute":
            raise InputError(f"{self.control} commands are absolute, got {self.meaning!r}", item=item)
        if self.moves and self.measured and not isfinite(self.lag):
            raise InputError("a motion with a measured position needs a finite lag: the margin kept to the ends of its range", item=item)
        still = all(low <= 0 <= high for low, high in zip(self.feature.low, self.feature.high, strict=True))
        if (self.moves or self.control == "effort") and not still:
            raise InputError("zero, which is standing still, lies outside of its range", item=item)

    @property
    def moves(self) -> bool:
        """Whether its values are motions (velocities or steps), so that zero is standing still."""
        return self.control == "velocity" or self.meaning == "step"

    @property
    def turns(self) -> bool:
        """Whether its values are rotations, of which each has several names (`mmsdk.vla.equivalent`), and not steps of one."""
        return self.feature.kind == "rotation" and not self.moves

    @property
    def averages(self) -> bool:
        """Whether the mean of two of its values is a value in between: not so for rotations and grippers."""
        return self.feature.kind not in ("rotation", "gripper")


@dataclass(frozen=True, slots=True)
class Workspace:
    """The box, in metres of the robot's base, that the tool stays in, and the tool's largest speed in m/s."""

    low: tuple[float, float, float] = (-inf, -inf, -inf)
    high: tuple[float, float, float] = (inf, inf, inf)
    speed: float = inf

    def __post_init__(self) -> None:
        if not all(low < high for low, high in zip(self.low, self.high, strict=True)) or not self.speed > 0:
            raise InputError(f"{self.low}..{self.high} at {self.speed} m/s is empty", item="workspace")

    @property
    def bounded(self) -> bool:
        """Whether it forbids anything."""
        return any(map(isfinite, (*self.low, *self.high, self.speed)))


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: how old an observation may be (`stale`), how long a camera may show the very same picture while the robot moves (`frozen`),
    how long the robot may go without a new chunk (`watchdog`), how long after an emergency stop no reset is taken (`cooldown`). `recover`
    fresh observations in a row end a stale spell."""

    stale: float = 0.2
    frozen: float = 1.0
    watchdog: float = 1.0
    cooldown: float = 0.5
    recover: int = 3

    def __post_init__(self) -> None:
        if not min(self.stale, self.frozen, self.watchdog) > 0 or not self.cooldown >= 0 or not 1 <= self.recover <= 1_000_000:
            raise InputError("stale, frozen and watchdog are above 0, cooldown is not below 0, recover from 1 to a million", item="timing")


@dataclass(frozen=True, slots=True)
class Contract:
    """One embodiment. `rate` is the number of actions a second; state and action are the concatenation of their features, in order."""

    name: str
    rate: float
    cameras: tuple[Camera, ...]
    state: tuple[Feature, ...]
    action: tuple[Command, ...]
    workspace: Workspace = Workspace()
    timing: Timing = Timing()

    def __post_init__(self) -> None:
        if not (isfinite(self.rate) and self.rate > 0):
            raise InputError(f"a rate of {self.rate} actions a second", item=self.name)
        if not self.action:
            raise InputError("there is no action", item=self.name)
        for part, names in (("cameras", self.cameras), ("state", self.state), ("action", [command.feature for command in self.action])):
            _check_unique(part, [entry.name for entry in names], self.name)
        for command in self.action:
            self._check_measured(command)

    def _check_measured(self, command: Command) -> None:
        if not command.measured:
            return
        named = {feature.name: feature for feature in self.state}
        item = f"{self.name}: command {command.feature.name}"
        if command.measured not in named:
            raise InputError(f"measured by {command.measured!r}, but the state is {', '.join(named) or 'empty'}", item=item)
        measured, mine = named[command.measured], command.feature
        if mine.kind == "gripper" and not command.moves:
            # converted by what both say is opened and closed, whatever their units
            if measured.kind != "gripper" or measured.size != mine.size:
                raise InputError(f"a gripper is measured by a gripper of its size, not by the {measured.kind} {measured.name!r}", item=item)
            return
        unit = {"velocity": f"{measured.unit}/s", "position": measured.unit}.get(command.control, mine.unit)
        if measured.size != mine.size or mine.unit != unit or (command.control == "position" and measured.layout != mine.layout):
            raise InputError(f"measured by {measured.name!r}, which differs in size, unit or layout", item=item)
        if mine.kind == "gripper" and (measured.opened, measured.closed) != (mine.opened, mine.closed):
            raise InputError(f"its steps and {measured.name!r}, which measures it, differ in what is opened and closed", item=item)
        if command.moves and any(high - low <= 2 * command.lag for low, high in zip(measured.low, measured.high, strict=True)):
            raise InputError(f"a lag of {command.lag} on both sides leaves nothing of the range of {measured.name!r}", item=item)

    @property
    def state_size(self) -> int:
        """How many numbers a state has."""
        return sum(feature.size for feature in self.state)

    @property
    def action_size(self) -> int:
        """How many numbers an action has."""
        return sum(command.feature.size for command in self.action)

    def state_columns(self, name: str) -> slice:
        """Where a state feature stands in the state. Raises InputError for an unknown name."""
        return _columns(self.state, name, self.name)

    def action_columns(self, name: str) -> slice:
        """Where an action feature stands in the action. Raises InputError for an unknown name."""
        return _columns([command.feature for command in self.action], name, self.name)

    def each_command(self) -> Iterator[tuple[Command, int, int]]:
        """Every number of an action in order: its command, its place within that, and its column."""
        column = 0
        for command in self.action:
            for place in range(command.feature.size):
                yield command, place, column
                column += 1


def _check_unique(part: str, names: Sequence[str], item: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or "" in names:
        raise InputError(f"{part}: {'a name is empty' if '' in names else f'{twice} stand there twice'}", item=item)


def _columns(features: Sequence[Feature], name: str, item: str) -> slice:
    start = 0
    for feature in features:
        if feature.name == name:
            return slice(start, start + feature.size)
        start += feature.size
    raise InputError(f"there is no feature {name!r}; there is {', '.join(feature.name for feature in features)}", item=item)
