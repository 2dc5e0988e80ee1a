"""Our messages as another library's own: the classes that rclpy publishes or rosbags writes, built field by field."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from mmsdk.vla.ros.messages import Level, Message

__all__ = ["Kinds", "Target", "rclpy_messages", "rebuilt", "rosbags_messages"]

Kinds = Callable[[str], Callable[..., object]]
"""From a type's name, as "sensor_msgs/msg/Image", to its class, which takes its fields by name."""


@dataclass(frozen=True, slots=True)
class Target:
    """How a library wants its messages: their classes, arrays of bytes or of doubles, and a `byte`."""

    kinds: Kinds
    numbers: Callable[[bytes | tuple[float, ...]], object]
    octet: Callable[[int], object]


def rclpy_messages(kinds: Kinds) -> Target:
    """Messages of rclpy: `array.array` for numbers, one byte for a `byte`. `kinds` is rosidl_runtime_py's `get_message`."""
    return Target(kinds, _array, lambda value: bytes((value,)))


def rosbags_messages(kinds: Kinds) -> Target:
    """Messages of rosbags: NumPy's arrays, whole numbers. `kinds` is `typestore.types.__getitem__`."""
    return Target(kinds, _numpy, int)


def rebuilt(message: Message, target: Target) -> object:
    """A message of ours as the target's class of the same type, with all that is in it."""
    values = {entry.name: _value(getattr(message, entry.name), entry.type == tuple[float, ...], target) for entry in fields(message)}
    return target.kinds(message.ros_type)(**values)


def _value(value: object, doubles: bool, target: Target) -> object:
    """An empty tuple does not tell whether it holds numbers; the field's type does."""
    if isinstance(value, Level):
        return target.octet(int(value))
    if isinstance(value, bytes):
        return target.numbers(value)
    if isinstance(value, tuple):
        return target.numbers(value) if doubles else [_value(entry, False, target) for entry in value]
    return rebuilt(value, target) if isinstance(value, Message) else value


def _array(values: bytes | tuple[float, ...]) -> object:
    return array("B", values) if isinstance(values, bytes) else array("d", values)


def _numpy(values: bytes | tuple[float, ...]) -> object:
    return np.frombuffer(values, np.uint8) if isinstance(values, bytes) else np.array(values, np.float64)
