"""The lifecycle against rcl_lifecycle's table: what is allowed, where it leads, and that the robot rests once when a node stops acting."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from mmsdk.errors import InputError, ModelError
from mmsdk.vla.ros.lifecycle import Lifecycle, Managed, Result, State, Transition


@dataclass
class Node:
    """Writes down what is asked of it; `results` says how a step ends, `raises` at which it raises."""

    results: dict[str, Result] = field(default_factory=dict)
    raises: str = ""
    told: list[str] = field(default_factory=list)

    def step(self, name: str) -> Result:
        self.told.append(name)
        if name == self.raises:
            raise ModelError(f"{name} went wrong")
        return self.results.get(name, Result.SUCCESS)

    def on_configure(self) -> Result:
        return self.step("configure")

    def on_activate(self) -> Result:
        return self.step("activate")

    def on_deactivate(self) -> Result:
        return self.step("deactivate")

    def on_cleanup(self) -> Result:
        return self.step("cleanup")

    def on_shutdown(self) -> Result:
        return self.step("shutdown")

    def on_error(self) -> Result:
        return self.step("error")

    def come_to_rest(self) -> None:
        self.step("rest")


WAY = {
    State.UNCONFIGURED: [],
    State.INACTIVE: [Transition.CONFIGURE],
    State.ACTIVE: [Transition.CONFIGURE, Transition.ACTIVATE],
    State.FINALIZED: [Transition.UNCONFIGURED_SHUTDOWN],
}
# state, transition: where success, failure and error (mended) lead; rcl_lifecycle's default state machine
TABLE = {
    (State.UNCONFIGURED, Transition.CONFIGURE): (State.INACTIVE, State.UNCONFIGURED),
    (State.INACTIVE, Transition.CLEANUP): (State.UNCONFIGURED, State.INACTIVE),
    (State.INACTIVE, Transition.ACTIVATE): (State.ACTIVE, State.INACTIVE),
    (State.ACTIVE, Transition.DEACTIVATE): (State.INACTIVE, State.ACTIVE),
    (State.UNCONFIGURED, Transition.UNCONFIGURED_SHUTDOWN): (State.FINALIZED, State.FINALIZED),
    (State.INACTIVE, Transition.INACTIVE_SHUTDOWN): (State.FINALIZED, State.FINALIZED),
    (State.ACTIVE, Transition.ACTIVE_SHUTDOWN): (State.FINALIZED, State.FINALIZED),
}


def brought(state: State, node: Node) -> Lifecycle:
    """A lifecycle in this state, by steps that all succeed."""
    results, raises, node.results, node.raises = node.results, node.raises, {}, ""
    lifecycle = Lifecycle(node)
    for transition in WAY[state]:
        lifecycle.change(transition)
    assert lifecycle.state == state
    node.results, node.raises, node.told = results, raises, []
    return lifecycle


def step_of(transition: Transition) -> str:
    return transition.name.lower().rpartition("_")[2]


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("transition", Transition)
def test_the_table_holds_and_all_else_is_refused(state: State, transition: Transition) -> None:
    node = Node()
    lifecycle = brought(state, node)
    if (state, transition) not in TABLE:
        with pytest.raises(InputError, match=f"lifecycle: {transition.name.lower()} is not possible when {state.name.lower()}"):
            lifecycle.change(transition)
        assert lifecycle.state == state and not node.told
        return
    assert transition in lifecycle.possible
    assert lifecycle.change(transition) == lifecycle.state == TABLE[state, transition][0]
    assert node.told == [*(["rest"] if state == State.ACTIVE else []), step_of(transition)]


@pytest.mark.parametrize(("state", "transition"), TABLE)
def test_failures_and_errors_lead_where_rcl_leads_them(state: State, transition: Transition) -> None:
    step = step_of(transition)
    assert brought(state, Node({step: Result.FAILURE})).change(transition) == TABLE[state, transition][1]
    assert brought(state, Node({step: Result.ERROR})).change(transition) == State.UNCONFIGURED
    for beyond in (Result.FAILURE, Result.ERROR):
        assert brought(state, Node({step: Result.ERROR, "error": beyond})).change(transition) == State.FINALIZED


@pytest.mark.parametrize(("state", "transition"), TABLE)
def test_what_a_step_raises_is_mended_and_told(state: State, transition: Transition) -> None:
    step = step_of(transition)
    node = Node(raises=step)
    lifecycle = brought(state, node)
    with pytest.raises(ModelError, match=f"{step} went wrong"):
        lifecycle.change(transition)
    assert lifecycle.state == State.UNCONFIGURED and node.told[-2:] == [step, "error"]
    assert node.told.count("rest") == (state == State.ACTIVE)


def test_a_node_that_cannot_be_mended_is_finalized_once() -> None:
    node = Node({"activate": Result.ERROR}, raises="error")
    lifecycle = brought(State.INACTIVE, node)
    with pytest.raises(ModelError, match="error went wrong"):
        lifecycle.change(Transition.ACTIVATE)
    assert lifecycle.state == State.FINALIZED and node.told == ["activate", "error"]
    with pytest.raises(InputError, match="is finalized already"):
        lifecycle.shutdown()


@pytest.mark.parametrize("state", [State.UNCONFIGURED, State.INACTIVE, State.ACTIVE])
def test_shutdown_works_from_everywhere(state: State) -> None:
    node = Node()
    assert brought(state, node).shutdown() == State.FINALIZED
    assert node.told.count("rest") == (state == State.ACTIVE)


def test_the_fallback_is_sent_exactly_once_whatever_ends_the_action() -> None:
    ends: dict[str, Callable[[Lifecycle], State]] = {
        "deactivate": lambda lifecycle: lifecycle.change(Transition.DEACTIVATE),
        "shutdown": Lifecycle.shutdown,
        "fail": Lifecycle.fail,
    }
    for name, end in ends.items():
        node = Node()
        lifecycle = brought(State.ACTIVE, node)
        assert end(lifecycle) != State.ACTIVE
        assert node.told.count("rest") == 1 and node.told[0] == "rest", name


def test_only_active_nodes_fail() -> None:
    node = Node()
    assert brought(State.ACTIVE, node).fail() == State.UNCONFIGURED and node.told == ["rest", "error"]
    with pytest.raises(InputError, match="only active ones"):
        brought(State.INACTIVE, Node()).fail()


def test_a_step_may_not_ask_for_another() -> None:
    class Eager(Node):
        def on_configure(self) -> Result:
            lifecycle.change(Transition.ACTIVATE)
            return Result.SUCCESS

    lifecycle = Lifecycle(Eager())
    with pytest.raises(InputError, match="activate while another transition is under way"):
        lifecycle.change(Transition.CONFIGURE)
    assert lifecycle.state == State.UNCONFIGURED and isinstance(Node(), Managed)
