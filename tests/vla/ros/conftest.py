"""Messages as others make them: the definitions of three ROS distributions and their CDR bytes, by rosbags."""

from collections.abc import Callable

import pytest
from rosbags.typesys import Stores, get_typestore
from rosbags.typesys.store import Typestore

from mmsdk.vla.ros.messages import Message
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
