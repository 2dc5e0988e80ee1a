"""What a node needs of the others on its network: topics, services, parameters and a log. `RclpyGraph` has it of rclpy.

Callbacks come in threads of the graph's own. Nothing here imports ROS, so that a node can be tried where there is none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from mmsdk.vla.ros.messages import Message
from mmsdk.vla.ros.parameters import Parameter, Parameters
from mmsdk.vla.ros.qos import Qos

__all__ = ["Answer", "Changed", "Graph", "Heard", "Publish", "Severity"]

Heard = Callable[[object], None]
"""Takes a message of whatever class the graph's messages are."""

Publish = Callable[[Message], None]

Answer = Callable[[Any, Any], Any]
"""A service: takes the request and an empty response, and gives that response with its fields filled in."""

Changed = Callable[[Mapping[str, object]], None]
"""Takes parameters that somebody wants to change. Raises InputError where one cannot be; then none is changed."""

Severity = Literal["info", "warn", "error"]


@runtime_checkable
class Graph(Protocol):
    """One node, by what it says and hears."""

    def subscribe(self, topic: str, ros_type: str, qos: Qos, heard: Heard) -> Callable[[], None]:
        """Hear every message on a topic; what is given back ends it."""
        ...

    def advertise(self, topic: str, ros_type: str, qos: Qos) -> tuple[Publish, Callable[[], None]]:
        """Publish on a topic; the second of what is given back ends it."""
        ...

    def serve(self, name: str, ros_type: str, answer: Answer) -> None:
        """Answer a service until the graph is closed; "~/" stands for the node's own name. One request at a time."""
        ...

    def declare(self, declared: Sequence[Parameter], parameters: Parameters, changed: Changed) -> None:
        """Let others see the node's parameters, and ask for changes of those that are not read only."""
        ...

    def offers(self, topic: str) -> tuple[Qos, ...]:
        """What each publisher of a topic offers."""
        ...

    def log(self, severity: Severity, text: str) -> None:
        """Say something where a node's words are read."""
        ...

    def close(self) -> None:
        """Leave the network; no callback is called any more."""
        ...
