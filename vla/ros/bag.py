"""rosbag2 files, written and read by rosbags: what ROS's own tools, Foxglove and PlotJuggler open.

with BagWriter(Path("run1")) as bag:
    bag.write("/joint_states", message, now)
for topic, when, message in read_bag(Path("run1")):
    ...
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal

from rosbags.interfaces import Connection
from rosbags.rosbag2 import Reader, StoragePlugin, Writer, WriterError
from rosbags.typesys import Stores, get_typestore

from mmsdk.errors import InputError
from mmsdk.vla.ros.messages import Message
from mmsdk.vla.ros.rebuild import rebuilt, rosbags_messages

__all__ = ["BagWriter", "Storage", "read_bag"]

Storage = Literal["mcap", "sqlite3"]
_PLUGINS: dict[Storage, StoragePlugin] = {"mcap": StoragePlugin.MCAP, "sqlite3": StoragePlugin.SQLITE3}
# Jazzy's own
_VERSION: Literal[9] = 9


class BagWriter:
    """Writes messages of ours, each topic of one type, in the order of their coming. Closed, the folder is a bag; before, it is none."""

    def __init__(self, path: Path, storage: Storage = "mcap") -> None:
        """A new folder at `path`. Raises InputError where there is something already, or none can be made."""
        self.path = path
        self._store = get_typestore(Stores.ROS2_JAZZY)
        self._target = rosbags_messages(self._store.types.__getitem__)
        self._connections: dict[str, Connection] = {}
        self._last = 0
        try:
            self._writer = Writer(path, version=_VERSION, storage_plugin=_PLUGINS[storage])
            self._writer.open()
        except (WriterError, OSError) as error:
            raise InputError(f"no bag can be made there: {error}", item=str(path)) from None

    def __enter__(self) -> "BagWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def write(self, topic: str, message: Message, now: int) -> None:
        """Write a message as of `now` (nanoseconds), or right after the one before: readers sort by time, and order is kept."""
        if topic not in self._connections:
            self._connections[topic] = self._writer.add_connection(topic, message.ros_type, typestore=self._store)
        self._last = max(now, self._last + 1)
        data = self._store.serialize_cdr(rebuilt(message, self._target), message.ros_type)
        self._writer.write(self._connections[topic], self._last, data)

    def close(self) -> None:
        """Finish the bag."""
        self._writer.close()


def read_bag(path: Path) -> Iterator[tuple[str, int, object]]:
    """Every message of a bag in the order of time: its topic, when it was written (nanoseconds), and the message as rosbags has it.

    `path` is a bag's folder, or a file of one. Raises InputError for what is no bag, is damaged or was not closed, and for messages that
    Jazzy does not define.
    """
    try:
        with Reader(path) as reader:
            store = get_typestore(Stores.ROS2_JAZZY)
            for connection, when, data in reader.messages():
                yield connection.topic, when, store.deserialize_cdr(data, connection.msgtype)
    except Exception as error:  # of a damaged file, rosbags and the databases below it raise whatever comes
        raise InputError(f"is no bag that can be read, or was not closed: {error}", item=str(path)) from error
