"""`mmsdk ros run|simulate --params robot.yaml`: a policy as a ROS 2 node, and a simulated arm to try it with.

The parameter file says which robot, which policy and which topics (docs/ros.md). With --json one object is printed at the end.
"""

import argparse
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from threading import Event
from types import FrameType

from mmsdk.apps.interrupts import handling
from mmsdk.apps.loading import found, made
from mmsdk.errors import InputError
from mmsdk.vla.clock import Clock
from mmsdk.vla.contract import Contract
from mmsdk.vla.drive import Drive, Session
from mmsdk.vla.record.recorder import Recording
from mmsdk.vla.ros.arm_node import ArmNode
from mmsdk.vla.ros.binding import bound, declared
from mmsdk.vla.ros.node import PolicyNode
from mmsdk.vla.ros.parameters import Parameters, load_parameters
from mmsdk.vla.ros.rclpy_graph import RclpyGraph
from mmsdk.vla.ros.robot import RosRobot
from mmsdk.vla.ros.settings import NODE, contract_of, settings_of
from mmsdk.vla.types import Policy
from mmsdk.vla.wire.client import RemotePolicy
from mmsdk.vla.wire.service import Service, difference

__all__ = ["run"]

USAGE = "write: policy: FILE.py:NAME, or ws://HOST:PORT"


@dataclass(frozen=True, slots=True)
class _Told:
    """What a parameter file says: the robot's contract, how to get a policy for it, and the node's parameters."""

    contract: Contract
    policy: Callable[[Clock], Policy]
    parameters: Parameters
    folder: Path


def run(args: argparse.Namespace) -> int:
    """Be a node until Ctrl-C, or for as long as was asked for; 0 where it came to its end in order."""
    told = _read(Path(args.params), args.node)
    # before rclpy is imported, for a policy may bring a TLS of its own
    return _run(told, args) if args.action == "run" else _simulate(told, args)


def _run(told: _Told, args: argparse.Namespace) -> int:
    parameters, settings = told.parameters, settings_of(told.parameters)
    kinematics = parameters.text("kinematics")
    forward = found(kinematics, "write: kinematics: FILE.py:NAME", told.folder) if kinematics else None
    sim = parameters.flag("use_sim_time")

    def make(robot: RosRobot, clock: Clock) -> Drive:
        session = Session(robot, told.policy(clock), clock, settings=settings, forward=forward)
        return ending.enter_context(Recording(Path(args.record))).drive(session) if args.record else session.drive()

    with ExitStack() as ending:
        graph = RclpyGraph(args.node, {"use_sim_time": sim})
        ending.callback(graph.close)
        node = PolicyNode(graph, bound(told.contract, parameters), make, parameters.text("instruction"), sim)
        graph.declare((*NODE, *declared(told.contract)), parameters, _changing(parameters, node.robot))
        with _ended_by_signals(node.stop, lambda: node.active):
            report = node.run(parameters.flag("autostart"), args.ticks)
    _print({"robot": told.contract.name, **asdict(report), "refused_messages": node.refused}, str(report), args.json)
    return 0


def _simulate(told: _Told, args: argparse.Namespace) -> int:
    stop = Event()
    # beside the policy's, whose name the file is for
    graph = RclpyGraph(f"{args.node}_arm")
    try:
        arm = ArmNode(graph, bound(told.contract, told.parameters))
        with _ended_by_signals(stop.set, lambda: True):
            report = arm.run(stop, args.seconds or inf)
    finally:
        graph.close()
    _print(
        asdict(report), f"{report.published} messages published, {report.commands} commands followed, {report.refused} refused", args.json
    )
    return 0


def _changing(parameters: Parameters, robot: RosRobot) -> Callable[[Mapping[str, object]], None]:
    def changed(changes: Mapping[str, object]) -> None:
        parameters.set(changes)
        robot.instruction = parameters.text("instruction")

    return changed


@contextmanager
def _ended_by_signals(stop: Callable[[], None], moving: Callable[[], bool]) -> Iterator[None]:
    """The first Ctrl-C lets a robot that moves come to rest; while nothing moves, and the second time, it interrupts as ever."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler)
        stop()
        if not moving():
            raise KeyboardInterrupt

    with handling(interrupt):
        yield


def _read(path: Path, node: str) -> _Told:
    given = load_parameters(path, node)
    if not given:
        raise InputError(f"it says nothing of a node {node}; write: {node}: {{ros__parameters: {{...}}}}", item=str(path))
    known = {parameter.name for parameter in NODE}
    first = Parameters(NODE, {name: value for name, value in given.items() if name in known})
    contract = contract_of(first.text("contract"), path.parent)
    contract, policy = _policy(first.text("policy"), contract, path.parent)
    return _Told(contract, policy, Parameters((*NODE, *declared(contract)), given), path.parent)


def _policy(text: str, contract: Contract | None, folder: Path) -> tuple[Contract, Callable[[Clock], Policy]]:
    """The contract that counts, and the policy's maker. A service's contract must be the file's, where it has one."""
    if text.startswith(("ws://", "wss://")):
        if contract is None:
            raise InputError("a policy elsewhere needs the robot's contract in this file", item="contract")
        return contract, lambda clock: RemotePolicy(text, contract, clock=clock)
    service = made(text, Service, USAGE, folder)
    differs = "" if contract is None else difference(asdict(contract), asdict(service.contract), "contract")
    if differs:
        raise InputError(f"the policy is for another robot: {differs}", item=text)
    return service.contract, lambda clock: service.session()


def _print(told: Mapping[str, object], text: str, as_json: bool) -> None:
    print(json.dumps(told) if as_json else text, flush=True)
