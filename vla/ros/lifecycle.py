"""The lifecycle of a managed node: unconfigured, inactive, active, finalized, and what leads from one to the other.

The machine is rcl_lifecycle's, with its numbers. On top of it: whenever a node leaves the active state, in whatever way, its robot is
brought to rest, exactly once and before anything else.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Protocol, runtime_checkable

from mmsdk.errors import InputError

__all__ = ["Lifecycle", "Managed", "Result", "State", "Transition"]


class State(IntEnum):
    """The primary states (lifecycle_msgs/State)."""

    UNCONFIGURED = 1
    INACTIVE = 2
    ACTIVE = 3
    FINALIZED = 4


class Transition(IntEnum):
    """What may be asked for (lifecycle_msgs/Transition)."""

    CONFIGURE = 1
    CLEANUP = 2
    ACTIVATE = 3
    DEACTIVATE = 4
    UNCONFIGURED_SHUTDOWN = 5
    INACTIVE_SHUTDOWN = 6
    ACTIVE_SHUTDOWN = 7


class Result(IntEnum):
    """How a step of the node ended (lifecycle_msgs/Transition)."""

    SUCCESS = 97
    FAILURE = 98
    ERROR = 99


@runtime_checkable
class Managed(Protocol):
    """A node's own part: what each transition does. FAILURE leaves things as they were, ERROR or an exception needs `on_error`."""

    def on_configure(self) -> Result:
        """Subscriptions, models, warm-up."""
        ...

    def on_activate(self) -> Result:
        """Publishers, watchdog, goals."""
        ...

    def on_deactivate(self) -> Result:
        """The opposite of `on_activate`."""
        ...

    def on_cleanup(self) -> Result:
        """The opposite of `on_configure`."""
        ...

    def on_shutdown(self) -> Result:
        """Free everything, from whatever state."""
        ...

    def on_error(self) -> Result:
        """After an error: SUCCESS where the node is as good as new, anything else where it is beyond repair."""
        ...

    def come_to_rest(self) -> None:
        """Bring the robot to rest: the node stops being active."""
        ...


_FROM_TO: dict[Transition, tuple[State, State]] = {
    Transition.CONFIGURE: (State.UNCONFIGURED, State.INACTIVE),
    Transition.CLEANUP: (State.INACTIVE, State.UNCONFIGURED),
    Transition.ACTIVATE: (State.INACTIVE, State.ACTIVE),
    Transition.DEACTIVATE: (State.ACTIVE, State.INACTIVE),
    Transition.UNCONFIGURED_SHUTDOWN: (State.UNCONFIGURED, State.FINALIZED),
    Transition.INACTIVE_SHUTDOWN: (State.INACTIVE, State.FINALIZED),
    Transition.ACTIVE_SHUTDOWN: (State.ACTIVE, State.FINALIZED),
}


class Lifecycle:
    """The state of one node. `state` changes by `change` and `fail` only."""

    def __init__(self, node: Managed) -> None:
        self.state = State.UNCONFIGURED
        self._node = node
        self._steps: dict[Transition, Callable[[], Result]] = {
            Transition.CONFIGURE: node.on_configure,
            Transition.CLEANUP: node.on_cleanup,
            Transition.ACTIVATE: node.on_activate,
            Transition.DEACTIVATE: node.on_deactivate,
        }
        self._running = False

    @property
    def possible(self) -> tuple[Transition, ...]:
        """What may be asked for now."""
        return tuple(transition for transition, (source, _) in _FROM_TO.items() if source == self.state)

    def change(self, transition: Transition) -> State:
        """Do it, and say where it led: not always to the goal, for a node may say FAILURE.

        Raises InputError, and changes nothing, where the state does not allow it or another transition is under way. What a step raises
        goes on to the caller once `on_error` has been through.
        """
        source, goal = _FROM_TO[transition]
        with self._alone(f"{transition.name.lower()}"):
            if source != self.state:
                allowed = ", ".join(each.name.lower() for each in self.possible) or "nothing"
                raise InputError(
                    f"{transition.name.lower()} is not possible when {self.state.name.lower()}; {allowed} is", item="lifecycle"
                )
            with self._mended():
                if source == State.ACTIVE:
                    self._node.come_to_rest()
                result = self._steps.get(transition, self._node.on_shutdown)()
                if result == Result.ERROR:
                    self._mend()
                elif result == Result.SUCCESS or goal == State.FINALIZED:
                    self.state = goal
        return self.state

    def shutdown(self) -> State:
        """Finalize, from wherever it is. Raises InputError where it is finalized already."""
        name = f"{self.state.name}_SHUTDOWN"
        if name not in Transition.__members__:
            raise InputError("is finalized already", item="lifecycle")
        return self.change(Transition[name])

    def fail(self) -> State:
        """An error outside of any transition, while active: the robot comes to rest, and `on_error` decides what becomes of the node.

        Raises InputError where the node is not active.
        """
        with self._alone("an error"):
            if self.state != State.ACTIVE:
                raise InputError(f"{self.state.name.lower()} nodes do not fail: only active ones do anything", item="lifecycle")
            with self._mended():
                self._node.come_to_rest()
                self._mend()
        return self.state

    def _mend(self) -> None:
        """Error processing: a node that cannot be mended is finalized, also where trying to raises."""
        self.state = State.FINALIZED
        if self._node.on_error() == Result.SUCCESS:
            self.state = State.UNCONFIGURED

    @contextmanager
    def _mended(self) -> Iterator[None]:
        """Error processing for what is raised inside, unless that was error processing itself; the exception goes on."""
        through = False
        try:
            yield
            through = True
        finally:
            if not through and self.state != State.FINALIZED:
                self._mend()

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """No transition begins while another is under way: a step of the node may not ask for one."""
        if self._running:
            raise InputError(f"{what} while another transition is under way", item="lifecycle")
        self._running = True
        try:
            yield
        finally:
            self._running = False
