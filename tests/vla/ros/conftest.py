"""Messages as others make them: the definitions of three ROS distributions and their CDR bytes, by rosbags; and a network of one process,
for tests of nodes where no ROS is installed, in which messages travel as those bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from types import SimpleNamespace

import pytest
from rosbags.typesys import Stores, get_typestore
from rosbags.typesys.store import Typestore

from mmsdk.vla.ros.graph import Answer, Changed, Heard, Publish, Severity
from mmsdk.vla.ros.messages import Message
from mmsdk.vla.ros.parameters import Parameter, Parameters
from mmsdk.vla.ros.qos import Qos, mismatches
from mmsdk.vla.ros.rebuild import rebuilt, rosbags_messages


@pytest.fixture(scope="session")
def store() -> Typestore:
    """The message definitions of Jazzy, the newest release with long support."""
    return get_typestore(Stores.ROS2_JAZZY)


@pytest.fixture(scope="session")
def wired(store: Typestore) -> Callable[[Message], bytes]:
    """A message of ours as the bytes that ROS 2 would send."""
    target = rosbags_messages(store.types.__getitem__)
    return lambda message: bytes(store.serialize_cdr(rebuilt(message, target), message.ros_type))


@pytest.fixture(scope="session")
def heard(store: Typestore, wired: Callable[[Message], bytes]) -> Callable[[Message], object]:
    """A message of ours once it has been through the wire: an object of rosbags' own class, with NumPy's arrays."""
    return lambda message: store.deserialize_cdr(wired(message), message.ros_type)


@dataclass
class Network:
    """What is heard and offered by topic; `wire` takes a message of ours through its bytes to a message of rosbags'."""

    wire: Callable[[Message], object]
    heard: dict[str, list[tuple[Qos, str, Heard]]] = field(default_factory=dict)
    offered: dict[str, list[Qos]] = field(default_factory=dict)
    sent: list[tuple[str, Message]] = field(default_factory=list)
    services: dict[str, Answer] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def graph(self) -> "LocalGraph":
        """A node's place in it."""
        return LocalGraph(self)

    def call(self, name: str, **request: object) -> SimpleNamespace:
        """Ask a service, as a client would: in the caller's thread."""
        return self.services[name](SimpleNamespace(**request), SimpleNamespace(current_state=SimpleNamespace()))


@dataclass
class LocalGraph:
    """See `mmsdk.vla.ros.graph.Graph`."""

    network: Network
    said: list[str] = field(default_factory=list)

    def subscribe(self, topic: str, ros_type: str, qos: Qos, heard: Heard) -> Callable[[], None]:
        entry = (qos, ros_type, heard)
        with self.network.lock:
            self.network.heard.setdefault(topic, []).append(entry)
        return lambda: self.network.heard[topic].remove(entry)

    def advertise(self, topic: str, ros_type: str, qos: Qos) -> tuple[Publish, Callable[[], None]]:
        self.network.offered.setdefault(topic, []).append(qos)

        def publish(message: Message) -> None:
            assert message.ros_type == ros_type and qos in self.network.offered[topic]
            with self.network.lock:
                self.network.sent.append((topic, message))
                fitting = [each for each in self.network.heard.get(topic, []) if not mismatches(qos, each[0])]
            for _, kind, heard in fitting:
                assert kind == ros_type
                heard(self.network.wire(message))

        return publish, lambda: self.network.offered[topic].remove(qos)

    def serve(self, name: str, ros_type: str, answer: Answer) -> None:
        self.network.services[name] = answer

    def declare(self, declared: Sequence[Parameter], parameters: Parameters, changed: Changed) -> None:
        self.parameters: Mapping[str, object] = {each.name: parameters.value(each.name) for each in declared}

    def offers(self, topic: str) -> tuple[Qos, ...]:
        return tuple(self.network.offered.get(topic, []))

    def log(self, severity: Severity, text: str) -> None:
        self.said.append(f"{severity}: {text}")

    def close(self) -> None:
        return None


@pytest.fixture
def network(heard: Callable[[Message], object]) -> Network:
    """A network on which nobody is yet."""
    return Network(heard)
