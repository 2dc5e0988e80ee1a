"""A policy as a managed ROS 2 node: it hears a robot's topics, runs the control loop, and publishes what the loop's gate has let through.

node = PolicyNode(graph, binding, make)
report = node.run()

The loop runs in the thread that calls `run`; messages come in threads of the graph's. There is one way from the policy to the robot: the
loop. Commands are published while the node is active and while it comes to rest, which it does whenever it stops being active.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any

from mmsdk.errors import InputError, ModelError
from mmsdk.vla.accounting import Account, LoopReport
from mmsdk.vla.clock import Clock
from mmsdk.vla.drive import Drive
from mmsdk.vla.ros.binding import Binding
from mmsdk.vla.ros.commands import Sent
from mmsdk.vla.ros.diagnostics import array_of, lifecycle_status, loop_status
from mmsdk.vla.ros.errands import Errands
from mmsdk.vla.ros.graph import Graph, Publish
from mmsdk.vla.ros.lifecycle import Lifecycle, Result, State, Transition
from mmsdk.vla.ros.messages import Clock as ClockMessage
from mmsdk.vla.ros.messages import DiagnosticArray
from mmsdk.vla.ros.protocols import AnyClock
from mmsdk.vla.ros.qos import CLOCK, COMMANDS, DEFAULT, SENSORS, mismatches
from mmsdk.vla.ros.robot import RosRobot
from mmsdk.vla.ros.sim_time import SimTime, SystemTime
from mmsdk.vla.ros.stamps import SECOND

__all__ = ["MakeDrive", "PolicyNode"]

MakeDrive = Callable[[RosRobot, Clock], Drive]
"""Builds the loop that runs the robot it is given, by the clock that the robot's messages are stamped by."""

_IDLE = 0.05
_OFTEN = 100


class PolicyNode:
    """One robot and one policy; see `Managed` for what the `on_...` are. `stop` may be called from anywhere, all else from one thread."""

    def __init__(self, graph: Graph, binding: Binding, make: MakeDrive, instruction: str = "", use_sim_time: bool = False) -> None:
        self._graph, self._binding, self._name = graph, binding, binding.contract.name
        self._clock: SimTime | SystemTime = SimTime([lambda: self.robot.clear()]) if use_sim_time else SystemTime()
        self.robot = RosRobot(binding, self._clock, self._publish, instruction)
        self.drive = make(self.robot, self._clock)
        self.lifecycle, self.errands = Lifecycle(self), Errands()
        self.refused: dict[str, int] = {}
        self._publishers: dict[str, Publish] = {}
        self._ends: dict[str, list[Callable[[], None]]] = {"heard": [], "said": []}
        self._stopped = Event()
        self._each_second = max(1, round(binding.contract.rate))
        self._diagnose, _ = graph.advertise("/diagnostics", DiagnosticArray.ros_type, DEFAULT)
        self._writing = ThreadPoolExecutor(1, "diagnostics")
        if isinstance(self._clock, SimTime):
            graph.subscribe("/clock", ClockMessage.ros_type, CLOCK, self._told_the_time)
        graph.serve("~/change_state", "lifecycle_msgs/srv/ChangeState", self._change)
        graph.serve("~/get_state", "lifecycle_msgs/srv/GetState", self._tell_state)
        graph.serve("~/stop", "std_srvs/srv/Trigger", self._trip)
        graph.serve("~/release", "std_srvs/srv/Trigger", self._release)

    def run(self, autostart: bool = True, ticks: int = 0) -> LoopReport:
        """Be a node until `stop`, or for this many ticks (0: no end); however it ends, the robot comes to rest and the node is finalized.

        `autostart` configures and activates it; without, ~/change_state does. Raises what these or the loop raise.
        """
        try:
            if autostart:
                self.lifecycle.change(Transition.CONFIGURE)
                self.lifecycle.change(Transition.ACTIVATE)
            while not self._stopped.is_set() and self.lifecycle.state != State.FINALIZED:
                self.errands.serve(0.0 if self.active else _IDLE)
                if self.active:
                    self.drive.step()
                    self._report_each_second()
                if ticks and self.drive.loop.account.ticks >= ticks:
                    break
        finally:
            self.errands.close()
            if self.lifecycle.state != State.FINALIZED:
                self.lifecycle.shutdown()
            self._writing.shutdown()
        return self.drive.report()

    def stop(self) -> None:
        """End `run` after the tick that it is at. A simulation that is paused is not waited for."""
        self._stopped.set()
        if isinstance(self._clock, SimTime):
            self._clock.close()

    @property
    def active(self) -> bool:
        """Whether the robot may be moved."""
        return self.lifecycle.state == State.ACTIVE

    def on_configure(self) -> Result:
        """Subscribe, and warm the policy up on what is heard: nothing is sent. Raises ModelError, saying what is not heard, and why."""
        for topic, ros_type in self._binding.input_types.items():
            self._ends["heard"].append(self._graph.subscribe(topic, ros_type, SENSORS, self._taking(topic)))
        try:
            self.drive.warm_up()
        except ModelError as error:
            raise ModelError(f"{error}{self._silence()}") from error
        self._graph.log("info", f"{self._name}: the policy is warm")
        return Result.SUCCESS

    def on_activate(self) -> Result:
        """Advertise the commands, and begin a new episode."""
        for topic, ros_type in self._binding.output_types.items():
            self._publishers[topic], end = self._graph.advertise(topic, ros_type, COMMANDS)
            self._ends["said"].append(end)
        self.drive.reset()
        self._graph.log("info", f"{self._name}: active, {self._binding.contract.rate:g} commands a second")
        return Result.SUCCESS

    def on_deactivate(self) -> Result:
        """Take the commands' topics back; the robot is at rest already."""
        self._end("said")
        self._publishers.clear()
        return Result.SUCCESS

    def on_cleanup(self) -> Result:
        """Hear no more, and forget what was heard."""
        self._end("heard")
        self.robot.clear()
        return Result.SUCCESS

    def on_shutdown(self) -> Result:
        """Say and hear no more."""
        self.on_deactivate()
        return self.on_cleanup()

    def on_error(self) -> Result:
        """As good as new, but that the policy is warmed up anew before it does anything."""
        self.drive.loop.warm = False
        return self.on_shutdown()

    def come_to_rest(self) -> None:
        """At the loop's rate, within the robot's limits."""
        self.drive.settle()

    def _publish(self, topic: str, message: Sent) -> None:
        self._publishers[topic](message)

    def _end(self, part: str) -> None:
        while self._ends[part]:
            self._ends[part].pop()()

    def _taking(self, topic: str) -> Callable[[object], None]:
        def heard(message: object) -> None:
            try:
                self.robot.take(topic, message)
            except InputError as error:
                count = self.refused[topic] = self.refused.get(topic, 0) + 1
                if count % _OFTEN == 1:
                    self._graph.log("warn", f"{error} (number {count} that {topic} was refused)")

        return heard

    def _told_the_time(self, message: object) -> None:
        assert isinstance(self._clock, SimTime) and isinstance(message, AnyClock), "that is what was subscribed to"
        try:
            self._clock.take(message)
        except InputError as error:
            self._graph.log("warn", str(error))

    def _silence(self) -> str:
        """Which topics nobody speaks on, or not so that it can be heard here."""
        told = []
        for topic in self._binding.inputs:
            offers = self._graph.offers(topic)
            why = [reason for offer in offers for reason in mismatches(offer, SENSORS)]
            if why or not offers:
                told.append(f"{topic}: {'; '.join(why) or 'nobody publishes it'}")
        return f" ({', '.join(told)})" if told else ""

    def _change(self, request: Any, response: Any) -> Any:
        number, label = int(request.transition.id), str(request.transition.label)
        named = [each for each in Transition if each == number or each.name.lower() == label]
        response.success = bool(named) and not self._asked(lambda: self.lifecycle.change(named[0]))
        return response

    def _tell_state(self, request: Any, response: Any) -> Any:
        state = self.lifecycle.state
        response.current_state.id, response.current_state.label = int(state), state.name.lower()
        return response

    def _trip(self, request: Any, response: Any) -> Any:
        self.drive.trip("asked for by ~/stop")
        response.success, response.message = True, "it comes to rest, and stays there until ~/release"
        return response

    def _release(self, request: Any, response: Any) -> Any:
        response.message = self._asked(self.drive.release)
        response.success = not response.message
        return response

    def _asked(self, job: Callable[[], object]) -> str:
        told = self.errands.ask(job)
        if told:
            self._graph.log("error", told)
        return told

    def _report_each_second(self) -> None:
        """Percentiles of hours take longer than a tick may: they are another thread's."""
        account = self.drive.loop.account
        if account.ticks % self._each_second == 0:
            self._writing.submit(self._write, _copied(account), round(self._clock.now() * SECOND))

    def _write(self, account: Account, now: int) -> None:
        statuses = [loop_status(account.report(), hardware=self._name), lifecycle_status(self.lifecycle.state)]
        self._diagnose(array_of(statuses, now))


def _copied(account: Account) -> Account:
    latency, jitter, busy = account.latency.copy(), account.jitter.copy(), account.busy.copy()
    return replace(account, latency=latency, jitter=jitter, busy=busy, reasons=account.reasons.copy())
