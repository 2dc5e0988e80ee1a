"""A robot by Eclipse Cyclone DDS, in a process of its own: no ROS, message types written out here by hand from common_interfaces.

It publishes a picture and its joints at 50 Hz, goes where each trajectory ends, and says at SIGTERM what it has been sent.
"""

import json
import signal
import sys
import time
from dataclasses import dataclass

from cyclonedds.core import Policy, Qos
from cyclonedds.domain import DomainParticipant
from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import float64, int32, sequence, uint8, uint32
from cyclonedds.pub import DataWriter
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic
from cyclonedds.util import duration


@dataclass
class Time(IdlStruct, typename="builtin_interfaces::msg::dds_::Time_"):
    sec: int32
    nanosec: uint32


@dataclass
class Duration(IdlStruct, typename="builtin_interfaces::msg::dds_::Duration_"):
    sec: int32
    nanosec: uint32


@dataclass
class Header(IdlStruct, typename="std_msgs::msg::dds_::Header_"):
    stamp: Time
    frame_id: str


@dataclass
class Image(IdlStruct, typename="sensor_msgs::msg::dds_::Image_"):
    header: Header
    height: uint32
    width: uint32
    encoding: str
    is_bigendian: uint8
    step: uint32
    data: sequence[uint8]


@dataclass
class JointState(IdlStruct, typename="sensor_msgs::msg::dds_::JointState_"):
    header: Header
    name: sequence[str]
    position: sequence[float64]
    velocity: sequence[float64]
    effort: sequence[float64]


@dataclass
class Point(IdlStruct, typename="trajectory_msgs::msg::dds_::JointTrajectoryPoint_"):
    positions: sequence[float64]
    velocities: sequence[float64]
    accelerations: sequence[float64]
    effort: sequence[float64]
    time_from_start: Duration


@dataclass
class JointTrajectory(IdlStruct, typename="trajectory_msgs::msg::dds_::JointTrajectory_"):
    header: Header
    joint_names: sequence[str]
    points: sequence[Point]


def main() -> None:
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    participant = DomainParticipant(int(sys.argv[1]))
    sensor = Qos(Policy.Reliability.BestEffort, Policy.History.KeepLast(5))
    command = Qos(Policy.Reliability.Reliable(duration(seconds=1)), Policy.History.KeepLast(1))
    pictures = DataWriter(participant, Topic(participant, "rt/camera", Image), qos=sensor)
    states = DataWriter(participant, Topic(participant, "rt/joint_states", JointState), qos=sensor)
    commands = DataReader(participant, Topic(participant, "rt/arm/joint_trajectory", JointTrajectory), qos=command)
    joints, count, names, period = [0.4, 0.6, 0.5], 0, [], 0
    pixels = [200] * (24 * 24 * 3)
    while not stopped:
        now = time.time_ns()
        header = Header(Time(now // 10**9, now % 10**9), "base")
        pixels[count % len(pixels)] ^= 1
        pictures.write(Image(header, 24, 24, "rgb8", 0, 72, pixels))
        # joints in another order than the policy's
        states.write(JointState(header, ["wrist", "base", "elbow"], [joints[2], joints[0], joints[1]], [], []))
        # what is no message tells that a writer has gone
        for trajectory in [sample for sample in commands.take(10) if isinstance(sample, JointTrajectory)]:
            count, names = count + 1, list(trajectory.joint_names)
            joints, period = list(trajectory.points[-1].positions), trajectory.points[-1].time_from_start.nanosec
        time.sleep(0.02)
    print(json.dumps({"commands": count, "names": names, "period_ns": period, "joints": joints}), flush=True)


main()
