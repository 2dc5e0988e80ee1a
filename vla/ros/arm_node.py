"""The planar arm behind ROS topics, in real time: a robot to try a policy node with where there is no robot.

It publishes its cameras and joints, and follows the joint trajectories that it is sent as a controller does, or refuses them.
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from threading import Event, Lock

from mmsdk.errors import InputError
from mmsdk.vla.camera import shown
from mmsdk.vla.clock import SimulatedClock
from mmsdk.vla.envs.planar_arm import PlanarArm
from mmsdk.vla.latency import Percentiles, percentiles
from mmsdk.vla.ros.binding import Binding
from mmsdk.vla.ros.graph import Graph
from mmsdk.vla.ros.image import image_message
from mmsdk.vla.ros.messages import Header, JointState
from mmsdk.vla.ros.protocols import AnyJointTrajectory
from mmsdk.vla.ros.qos import COMMANDS, SENSORS
from mmsdk.vla.ros.sim_time import SystemTime
from mmsdk.vla.ros.stamps import SECOND, time_of
from mmsdk.vla.ros.trajectory import read_trajectory

__all__ = ["ArmNode", "ArmReport"]

_KEPT = 100_000


@dataclass(frozen=True, slots=True)
class ArmReport:
    """What the arm has gone through: messages published, commands taken and refused, the time between commands in milliseconds, the joints
    in rad as it stands, and the largest step of a joint between two commands in rad."""

    published: int
    commands: int
    refused: int
    interval_ms: Percentiles
    joints: tuple[float, ...]
    largest_step: float


class ArmNode:
    """`run` is for one thread; commands come in the graph's."""

    def __init__(self, graph: Graph, binding: Binding, hz: float = 50.0) -> None:
        """`hz`: how often it publishes. Raises InputError for a binding to another robot: three joints, by one trajectory of positions."""
        contract = binding.contract
        if list(binding.outputs.values()) != ["JointTrajectory"] or len(binding.cameras) > 1 or len(binding.state) != 1 or not 0 < hz < inf:
            raise InputError("the simulated arm has three joints and a camera, and takes one JointTrajectory", item=contract.name)
        self._binding, self._hz, self._time, self._simulated = binding, hz, SystemTime(), SimulatedClock()
        self._arm = PlanarArm(contract, self._simulated)
        self._names = [name for entry in binding.commands for name in entry.names]
        self._begun = self._time.now()
        self._lock = Lock()
        self._published = self._refused = 0
        self._moments: deque[float] = deque(maxlen=_KEPT)
        self._last: tuple[float, ...] = ()
        self._largest = 0.0
        self._graph = graph
        self._says = {topic: graph.advertise(topic, kind, SENSORS)[0] for topic, kind in binding.input_types.items()}
        for topic, kind in binding.output_types.items():
            graph.subscribe(topic, kind, COMMANDS, self._follow)

    def run(self, stop: Event, seconds: float = inf) -> ArmReport:
        """Be an arm until `stop` is set, or for so many seconds."""
        while self._time.now() - self._begun < seconds and not stop.wait(1 / self._hz):
            self._say()
        with self._lock:
            gaps = percentiles([1000 * (after - before) for before, after in pairwise(self._moments)])
            return ArmReport(self._published, len(self._moments), self._refused, gaps, tuple(self._arm.joints), self._largest)

    def _say(self) -> None:
        with self._lock:
            self._simulated.passed = self._time.now() - self._begun
            seen = self._arm.observe()
        header = Header(time_of(round((self._begun + seen.stamp.captured) * SECOND)), "base")
        for entry in self._binding.cameras:
            (camera,) = self._binding.contract.cameras
            (image,) = seen.images.values()
            pixels = shown(camera, image).pixels.permute(1, 2, 0).numpy()
            self._says[entry.topic](image_message(pixels, f"{camera.colour}8", header))
        (joints,) = self._binding.state
        self._says[joints.topic](JointState(header, joints.names, tuple(seen.state.tolist())))
        self._published += len(self._says)

    def _follow(self, message: object) -> None:
        """Go where a trajectory ends, now: a controller's own way there is the arm's lag."""
        now = self._time.now()
        assert isinstance(message, AnyJointTrajectory), "that is what was subscribed to"
        try:
            target = read_trajectory(message, self._names, round(now * SECOND)).values[-1]
        except InputError as error:
            self._refused += 1
            self._graph.log("warn", str(error))
            return
        with self._lock:
            self._simulated.passed = now - self._begun
            self._arm.apply(target)
            self._moments.append(now)
            values = tuple(target.tolist())
            self._largest = max([self._largest, *(abs(new - old) for new, old in zip(values, self._last, strict=False))])
            self._last = values
