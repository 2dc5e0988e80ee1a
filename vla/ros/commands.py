"""The loop's actions as the messages that drive a robot: every topic's commands in one message, in ROS's units."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vla.contract import UNITS, Command, Contract
from mmsdk.vla.ros.binding import Binding, CommandTopic
from mmsdk.vla.ros.messages import Header, JointTrajectory, Time, Twist, TwistStamped
from mmsdk.vla.ros.trajectory import joint_trajectory
from mmsdk.vla.ros.twist import twist

__all__ = ["Sent", "command_messages"]

Sent = JointTrajectory | Twist | TwistStamped


def command_messages(binding: Binding, actions: Float[Tensor, "h a"], now: Time) -> dict[str, Sent]:
    """h actions, each a period of the contract's rate after the one before, as one message for every topic.

    A trajectory begins when it arrives (stamp 0) and reaches the first action a period later. A Twist holds one action and is stamped
    `now` where it has a header. Raises InputError for a wrong number of numbers, several actions for a Twist, and what is not finite; then
    nothing is made.
    """
    contract = binding.contract
    if actions.shape[1] != contract.action_size:
        raise InputError(f"actions of {actions.shape[1]} numbers, expected {contract.action_size}; none is made up", item=contract.name)
    topics: dict[str, list[CommandTopic]] = {}
    for entry in binding.commands:
        topics.setdefault(entry.topic, []).append(entry)
    return {topic: _message(contract, entries, actions, now) for topic, entries in topics.items()}


def _message(contract: Contract, entries: Sequence[CommandTopic], actions: Tensor, now: Time) -> Sent:
    """What goes out on one topic; all of its entries are of one message and one kind of control."""
    commands = {command.feature.name: command for command in contract.action}
    columns = [_in_ros_units(contract, commands[entry.command], actions) for entry in entries]
    names = [name for entry in entries for name in entry.names]
    values = torch.cat(columns, dim=1)
    first = entries[0]
    if first.message == "JointTrajectory":
        return joint_trajectory(names, values, commands[first.command].control, 1.0 / contract.rate)
    if len(values) != 1:
        raise InputError(f"{len(values)} actions in a {first.message}, which holds one", item=first.topic)
    velocity = twist(dict(zip(names, values[0].tolist(), strict=True)))
    return velocity if first.message == "Twist" else TwistStamped(Header(now), velocity)


def _in_ros_units(contract: Contract, command: Command, actions: Tensor) -> Tensor:
    return actions[:, contract.action_columns(command.feature.name)].double() * UNITS[command.feature.unit][1]
