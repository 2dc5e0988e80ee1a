"""A policy node beside a simulated arm, in real time over a network of one process: the loop as a managed node."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmsdk.errors import InputError, ModelError
from mmsdk.vla.clock import Clock
from mmsdk.vla.contract import Contract, Timing
from mmsdk.vla.drive import Drive, Session, Settings
from mmsdk.vla.envs.planar_arm import planar_contract
from mmsdk.vla.loop import Pace
from mmsdk.vla.ros.arm_node import ArmNode, ArmReport
from mmsdk.vla.ros.binding import Binding, CameraTopic, CommandTopic, StateTopic
from mmsdk.vla.ros.errands import Errands
from mmsdk.vla.ros.graph import Graph
from mmsdk.vla.ros.lifecycle import State
from mmsdk.vla.ros.messages import Clock as ClockMessage
from mmsdk.vla.ros.messages import DiagnosticArray, Header, JointState, JointTrajectory, Level, Time
from mmsdk.vla.ros.node import PolicyNode
from mmsdk.vla.ros.qos import LATCHED, SENSORS, Qos
from mmsdk.vla.ros.robot import RosRobot
from mmsdk.vla.types import ActionChunk, Request

JOINTS = ("base", "elbow", "wrist")
COMMANDS = "/arm/joint_trajectory"
GOAL = torch.tensor([0.8, 0.2, 0.1], dtype=torch.float64)


@dataclass
class Reach:
    """Takes every joint a fifth of what is left to the goal, action by action, from where the robot is seen to be."""

    goal: torch.Tensor = field(default_factory=lambda: GOAL)
    asked: list[str] = field(default_factory=list)

    def reset(self, episode: int) -> None:
        self.asked.append(f"reset {episode}")

    def __call__(self, request: Request) -> ActionChunk:
        seen = request.observation
        assert int(seen.images["side"].pixels.max()) > 100, "the arm is in the picture"
        self.asked.append(seen.instruction)
        left = 0.8 ** torch.arange(1, 17, dtype=torch.float64)[:, None]
        return ActionChunk(self.goal + left * (seen.state - self.goal), seen.stamp, "reach")


def patient(cooldown: float = 0.5) -> Contract:
    """The arm's contract, for machines that do much else meanwhile."""
    return planar_contract("position", 40.0, timing=Timing(stale=1.0, watchdog=5.0, cooldown=cooldown))


def binding(contract: Contract) -> Binding:
    cameras = (CameraTopic("side", "/camera"),)
    return Binding(contract, cameras, (StateTopic("joints", "/joint_states", JOINTS),), (CommandTopic("joints", COMMANDS, JOINTS),))


def maker(policy: Reach, cold: float = 10.0) -> Callable[[RosRobot, Clock], Drive]:
    return lambda robot, clock: Session(robot, policy, clock, settings=Settings(Pace(cold=cold, deadline=2.0))).drive()


@contextmanager
def arm(network: Any, contract: Contract) -> Iterator[list[ArmReport]]:
    """The arm while something is done, and then what it has gone through."""
    stop, reports = Event(), []
    node = ArmNode(network.graph(), binding(contract))
    running = Thread(target=lambda: reports.append(node.run(stop)))
    running.start()
    try:
        yield reports
    finally:
        stop.set()
        running.join()


@contextmanager
def running(node: PolicyNode, autostart: bool = True) -> Iterator[None]:
    thread = Thread(target=node.run, args=(autostart,))
    thread.start()
    try:
        yield
    finally:
        node.stop()
        thread.join()


def run_in_vain(node: PolicyNode) -> None:
    with pytest.raises(ModelError, match="no fresh observation"):
        node.run()


def until(true: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < 10, "it does not come true"
        time.sleep(0.01)


def commands(network: Any) -> list[list[float]]:
    return [list(message.points[0].positions) for topic, message in network.sent if topic == COMMANDS]


def test_a_policy_drives_an_arm_over_topics_and_leaves_it_at_rest(network: Any) -> None:
    contract, policy = patient(), Reach()
    with arm(network, contract) as reports:
        graph = network.graph()
        node = PolicyNode(graph, binding(contract), maker(policy), "to the goal")
        assert isinstance(graph, Graph) and node.lifecycle.state == State.UNCONFIGURED
        report = node.run(ticks=100)
        time.sleep(0.3)
    (done,) = reports
    assert list(done.joints) == pytest.approx(GOAL.tolist(), abs=0.03)
    assert done.refused == 0 and 80 <= done.commands <= 110 and done.largest_step <= 1.5 / 40 + 1e-9
    assert report.ticks == 100 and not report.failed and report.stale_rate < 0.2 and node.refused == {}
    assert policy.asked[:2] == ["reset 0", "to the goal"] and "reset 1" in policy.asked
    assert node.lifecycle.state == State.FINALIZED and not network.offered[COMMANDS]
    assert not [entry for topic in ("/camera", "/joint_states") for entry in network.heard[topic]]
    told = [message for topic, message in network.sent if topic == "/diagnostics"]
    assert isinstance(told[0], DiagnosticArray) and told[0].status[1].level == Level.OK


def test_the_lifecycle_is_asked_for_and_each_deactivation_brings_to_rest(network: Any) -> None:
    contract = patient()

    def change(label: str) -> bool:
        return bool(network.call("~/change_state", transition=SimpleNamespace(id=0, label=label)).success)

    with arm(network, contract):
        graph = network.graph()
        node = PolicyNode(graph, binding(contract), maker(Reach()))
        with running(node, autostart=False):
            assert network.call("~/get_state").current_state.label == "unconfigured" and not change("activate")
            assert "activate is not possible when unconfigured" in graph.said[-1]
            assert change("configure") and not commands(network)
            for _ in range(2):
                assert change("activate")
                before = len(commands(network))
                until(lambda before=before: len(commands(network)) > before + 12)
                assert change("deactivate") and not network.offered[COMMANDS]
                sent = commands(network)
                # it comes to rest within its limits: no step is longer than the one before it by more than the acceleration allows
                steps = [[new - old for new, old in zip(*pair, strict=True)] for pair in zip(sent[-20:], sent[-19:], strict=False)]
                assert all(abs(last) < 2 * 6.0 / 40**2 for last in steps[-1])
                time.sleep(0.1)
                assert commands(network) == sent
            assert change("cleanup") and network.call("~/get_state").current_state.id == State.UNCONFIGURED
            assert not change("nonsense")
        assert not change("configure") and graph.said[-1] == "error: the node has been stopped"


def test_the_emergency_stop_goes_by_no_queue_and_is_released_by_people(network: Any) -> None:
    contract = patient(cooldown=0.3)
    with arm(network, contract):
        node = PolicyNode(network.graph(), binding(contract), maker(Reach()))
        with running(node):
            until(lambda: len(commands(network)) > 15)
            assert network.call("~/stop").success
            refused = network.call("~/release")
            assert not refused.success and "no reset before 0.3 s" in refused.message
            time.sleep(0.4)
            resting = commands(network)[-1]
            time.sleep(0.1)
            assert commands(network)[-1] == resting != GOAL.tolist()
            assert network.call("~/release").success
            until(lambda: commands(network)[-1] != resting)


def test_silence_is_told_with_its_reason(network: Any) -> None:
    contract = patient()
    graph = network.graph()
    graph.advertise("/camera", "sensor_msgs/msg/Image", Qos("best_effort", deadline=1.0))
    node = PolicyNode(graph, binding(contract), maker(Reach(), cold=0.2))
    with pytest.raises(ModelError, match=r"no fresh observation within 0.2 s \(/joint_states: nobody publishes it\)"):
        node.run()
    assert node.lifecycle.state == State.FINALIZED and not commands(network)


def test_what_cannot_be_used_is_refused_and_counted_and_moves_nothing(network: Any) -> None:
    contract = patient()
    graph = network.graph()
    say, _ = graph.advertise("/joint_states", JointState.ros_type, SENSORS)
    node = PolicyNode(graph, binding(contract), maker(Reach(), cold=0.3))
    thread = Thread(target=run_in_vain, args=(node,))
    thread.start()
    until(lambda: bool(network.heard.get("/joint_states")))
    for _ in range(3):
        say(JointState(Header(), JOINTS, (0.0, 0.0, 0.0)))
    thread.join()
    assert node.refused == {"/joint_states": 3} and not commands(network)
    assert [text for text in graph.said if "not stamped" in text and "number 1 that /joint_states was refused" in text]


def test_a_simulation_that_is_paused_is_not_waited_for_at_the_end(network: Any) -> None:
    contract = patient()
    graph = network.graph()
    node = PolicyNode(graph, binding(contract), maker(Reach()), use_sim_time=True)
    tell, _ = network.graph().advertise("/clock", ClockMessage.ros_type, LATCHED)
    tell(ClockMessage(Time(100, 0)))
    tell(ClockMessage(Time(-1, 0)))
    assert graph.said == ["warn: /clock: -1.0 s is before all time"]
    with running(node, autostart=False):
        assert node.lifecycle.state == State.UNCONFIGURED
    assert node.lifecycle.state == State.FINALIZED


def test_an_arm_takes_no_other_robots_topics_and_refuses_what_has_ended(network: Any) -> None:
    contract = patient()
    graph = network.graph()
    node = ArmNode(graph, binding(contract))
    say, _ = network.graph().advertise(COMMANDS, JointTrajectory.ros_type, Qos(depth=1))
    say(JointTrajectory(Header(), JOINTS, ()))
    assert node.run(Event(), 0.05).refused == 1 and graph.said == ["warn: trajectory: has no points"]
    rolling = CommandTopic("joints", "/cmd", ("angular.x", "angular.y", "angular.z"), "Twist")
    with pytest.raises(InputError, match="takes one JointTrajectory"):
        ArmNode(graph, replace(binding(planar_contract("velocity")), commands=(rolling,)))


def test_errands_are_run_in_order_and_nobody_waits_for_ever() -> None:
    errands, told = Errands(), []
    asking = [Thread(target=lambda job=job: told.append(errands.ask(job))) for job in (lambda: 1, lambda: 1 / 0)]
    for thread in asking:
        thread.start()
        time.sleep(0.05)
    errands.serve(1.0)
    with pytest.raises(ZeroDivisionError):
        errands.serve(1.0)
    errands.close()
    for thread in asking:
        thread.join()
    assert sorted(told) == ["", "the node broke"] and errands.ask(lambda: 1) == "the node has been stopped"
