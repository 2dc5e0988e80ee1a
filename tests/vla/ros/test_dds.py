"""Nodes over a real network: processes of their own, rclpy and DDS between them. Skipped where there is no rclpy: its wheels are for 3.11.

rclpy's wheels start the interpreter anew to find their libraries; so here nothing of rclpy is imported, only processes are started.
"""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

if importlib.util.find_spec("rclpy") is None:
    if os.environ.get("CI") and sys.version_info[:2] == (3, 11):
        raise ModuleNotFoundError("rclpy: the extra dev brings it, so that a skip would hide that nothing was tested")
    pytest.skip("rclpy is not installed: pip install '.[ros]' in the clone on Python 3.11", allow_module_level=True)

ROBOT = """
/policy:
  ros__parameters:
    policy: reach.py:reach
    instruction: to the goal
    cameras: {side: {topic: /camera}}
    state: {joints: {topic: /joint_states, names: [base, elbow, wrist]}}
    action: {joints: {topic: /arm/joint_trajectory, names: [base, elbow, wrist]}}
"""
REACH = '''
import torch

from mmsdk.vla.contract import Timing
from mmsdk.vla.envs.planar_arm import planar_contract
from mmsdk.vla.types import ActionChunk
from mmsdk.vla.wire.service import Service

GOAL = torch.tensor([0.8, 0.2, 0.1], dtype=torch.float64)


class Reach:
    """Takes every joint a tenth of what is left to the goal, action by action, from where the robot is seen to be."""

    def reset(self, episode):
        pass

    def __call__(self, request):
        seen = request.observation
        assert int(seen.images["side"].pixels.max()) > 100 and seen.instruction == "to the goal"
        left = 0.9 ** torch.arange(1, 17, dtype=torch.float64)[:, None]
        return ActionChunk(GOAL + left * (seen.state - GOAL), seen.stamp, "reach")


def reach():
    return Service(planar_contract("position", 20.0, timing=Timing(stale=0.5, watchdog=2.0)), Reach)
'''


@pytest.fixture
def robot(tmp_path: Path) -> Path:
    """A parameter file, with the policy beside it."""
    (tmp_path / "reach.py").write_text(REACH, encoding="utf-8")
    path = tmp_path / "robot.yaml"
    path.write_text(ROBOT, encoding="utf-8")
    return path


@pytest.fixture
def alone(request: pytest.FixtureRequest) -> dict[str, str]:
    """An environment in which only this machine is heard, and no other test."""
    domain = str(1 + (os.getpid() + hash(request.node.name)) % 100)
    return os.environ | {"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST", "ROS_DOMAIN_ID": domain}


def start(environment: dict[str, str], *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def mmsdk(environment: dict[str, str], *words: str) -> "Iterator[subprocess.Popen[str]]":
    """A program of ours while something is done."""
    with start(environment, "-m", "mmsdk.apps.cli", *words) as running:
        try:
            yield running
        finally:
            running.kill()


def told(running: "subprocess.Popen[str]") -> dict[str, object]:
    """What a program says at its end; its own words are the message where it fails."""
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0, out + err
    result: dict[str, object] = json.loads(out.splitlines()[-1])
    return result


def test_two_processes_close_the_loop_at_20_hz(robot: Path, alone: dict[str, str], tmp_path: Path) -> None:
    """A robot's node and a policy's, DDS between them; and what went over it is replayed bit for bit."""
    bag = str(tmp_path / "run")
    with (
        mmsdk(alone, "ros", "simulate", "--params", str(robot), "--json") as arm,
        mmsdk(alone, "ros", "run", "--params", str(robot), "--ticks", "120", "--record", bag, "--json") as policy,
    ):
        report = told(policy)
        arm.terminate()
        moved = told(arm)
    assert report["robot"] == "planar arm" and report["ticks"] == 120 and report["failed"] == 0 and report["refused_messages"] == {}
    assert moved["refused"] == 0 and 100 <= moved["commands"] <= 140
    assert 45 < moved["interval_ms"]["p50"] < 60 and moved["largest_step"] <= 1.5 / 20 + 1e-9
    assert moved["joints"] == pytest.approx([0.8, 0.2, 0.1], abs=0.05)
    with mmsdk(alone, "robot", "replay", bag, "--json") as replay:
        replayed = told(replay)
    assert replayed["identical"] and replayed["commands"] >= 100


def test_ctrl_c_lets_the_robot_come_to_rest(robot: Path, alone: dict[str, str]) -> None:
    with (
        mmsdk(alone, "ros", "simulate", "--params", str(robot), "--json") as arm,
        mmsdk(alone, "ros", "run", "--params", str(robot), "--json") as policy,
    ):
        assert policy.stderr is not None
        while "active" not in (line := policy.stderr.readline()):
            assert line, "the node ended before it was active"
        # it says so on the way there
        time.sleep(0.5)
        policy.send_signal(2)
        assert told(policy)["robot"] == "planar arm"
        arm.send_signal(2)
        assert told(arm)["refused"] == 0


def test_a_robot_that_says_nothing_is_told(robot: Path, alone: dict[str, str]) -> None:
    robot.write_text(ROBOT + "    pace: {cold: 0.5}\n", encoding="utf-8")
    with mmsdk(alone, "ros", "run", "--params", str(robot), "--json") as policy:
        out, _ = policy.communicate(timeout=60)
    assert (
        policy.returncode == 2 and "/camera: nobody publishes it, /joint_states: nobody publishes it" in json.loads(out)["error"]["message"]
    )


PARAMETERS = """
    import json, time
    import rclpy
    from rcl_interfaces.srv import GetParameters, SetParameters
    from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
    from lifecycle_msgs.srv import ChangeState, GetState
    from std_srvs.srv import Trigger

    rclpy.init()
    node = rclpy.create_node("somebody")

    def call(kind, name, request):
        client = node.create_client(kind, name)
        assert client.wait_for_service(20), name
        future = client.call_async(request)
        rclpy.spin_until_future_complete(node, future, timeout_sec=20)
        return future.result()

    def change(name, value):
        kinds = {str: (ParameterType.PARAMETER_STRING, "string_value"), float: (ParameterType.PARAMETER_DOUBLE, "double_value")}
        kind, field = kinds[type(value)]
        wanted = Parameter(name=name, value=ParameterValue(type=kind, **{field: value}))
        (result,) = call(SetParameters, "/policy/set_parameters", SetParameters.Request(parameters=[wanted])).results
        return result.successful, result.reason

    state = lambda: call(GetState, "/policy/get_state", GetState.Request()).current_state.label
    begun = time.monotonic()
    while state() != "active" and time.monotonic() - begun < 30:
        time.sleep(0.2)
    names = ["state.joints.names", "action.joints.topic", "pace.expert", "kinematics"]
    values = call(GetParameters, "/policy/get_parameters", GetParameters.Request(names=names)).values
    told = {
        "state": state(),
        "values": [list(values[0].string_array_value), values[1].string_value, values[2].integer_value, values[3].string_value],
        "instruction": change("instruction", "somewhere else"),
        "slop": change("slop", -1.0),
        "topic": change("action.joints.topic", "/elsewhere"),
        "stop": call(Trigger, "/policy/stop", Trigger.Request()).success,
    }
    deactivate = ChangeState.Request()
    deactivate.transition.label = "deactivate"
    told["deactivated"], told["after"] = call(ChangeState, "/policy/change_state", deactivate).success, state()
    print(json.dumps(told))
    node.destroy_node()
    rclpy.shutdown()
"""


def test_others_see_its_parameters_and_change_what_may_be_changed(robot: Path, alone: dict[str, str], tmp_path: Path) -> None:
    robot.write_text(ROBOT.replace("to the goal", "to the goal\n    slop: 0.05"), encoding="utf-8")
    with (
        mmsdk(alone, "ros", "simulate", "--params", str(robot), "--json"),
        mmsdk(alone, "ros", "run", "--params", str(robot), "--json"),
        start(alone, "-c", textwrap.dedent(PARAMETERS)) as somebody,
    ):
        found = told(somebody)
    assert found["state"] == "active" and found["values"] == [["base", "elbow", "wrist"], "/arm/joint_trajectory", 8, ""]
    assert found["instruction"] == [True, ""] and found["stop"] and found["deactivated"] and found["after"] == "inactive"
    assert not found["slop"][0] and not found["topic"][0]


TLS = """
    import json, sys
    from mmsdk.vla.ros.rclpy_graph import TLS, RclpyGraph
    assert "rclpy" not in sys.modules
    graph = RclpyGraph("/tls")
    assert "rclpy" in sys.modules
    import ssl

    def side(server):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("AECDH-AES256-SHA:@SECLEVEL=0")
        into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
        return context.wrap_bio(into, out, server_side=server), into, out

    (client, client_in, client_out), (server, server_in, server_out) = side(False), side(True)
    done = set()
    while len(done) < 2:
        for name, end in (("client", client), ("server", server)):
            try:
                end.do_handshake()
                done.add(name)
            except ssl.SSLWantReadError:
                pass
        server_in.write(client_out.read())
        client_in.write(server_out.read())
    client.write(b"hello")
    server_in.write(client_out.read())
    print(json.dumps({"heard": server.read().decode(), "same": TLS == ssl.OPENSSL_VERSION}))
    graph.close()
"""


def test_vr_36_tls_works_after_rclpy_was_imported(alone: dict[str, str]) -> None:
    """Python's TLS is imported before rclpy, whose libraries bring an OpenSSL of their own: a whole handshake afterwards."""
    with start(alone, "-c", textwrap.dedent(TLS)) as process:
        assert told(process) == {"heard": "hello", "same": True}


PEER = Path(__file__).with_name("cyclone_peer.py")


@pytest.mark.skipif(importlib.util.find_spec("cyclonedds") is None, reason="cyclonedds is not installed, which the extra dev brings")
def test_another_vendors_dds_is_a_robot_too(robot: Path, alone: dict[str, str], tmp_path: Path) -> None:
    """Images and joint states out of Eclipse Cyclone DDS, trajectories back into it; types written out there by hand."""
    profiles = tmp_path / "fastdds.xml"
    profiles.write_text(NO_PROPAGATION, encoding="utf-8")
    fast = alone | {"FASTDDS_DEFAULT_PROFILES_FILE": str(profiles)}
    with (
        start(alone | {"CYCLONEDDS_URI": LOOPBACK}, str(PEER), alone["ROS_DOMAIN_ID"]) as peer,
        mmsdk(fast, "ros", "run", "--params", str(robot), "--ticks", "80", "--json") as policy,
    ):
        report = told(policy)
        peer.terminate()
        found = told(peer)
    assert report["ticks"] == 80 and report["failed"] == 0 and report["refused_messages"] == {}
    assert found["commands"] >= 60 and found["names"] == ["base", "elbow", "wrist"] and found["period_ns"] == 50_000_000
    assert found["joints"] == pytest.approx([0.8, 0.2, 0.1], abs=0.1)


LOOPBACK = (
    "<CycloneDDS><Domain><General><Interfaces><NetworkInterface name='lo'/></Interfaces><AllowMulticast>false</AllowMulticast></General>"
    "<Discovery><ParticipantIndex>auto</ParticipantIndex><MaxAutoParticipantIndex>32</MaxAutoParticipantIndex>"
    "<Peers><Peer address='127.0.0.1'/></Peers></Discovery></Domain></CycloneDDS>"
)
NO_PROPAGATION = """<?xml version="1.0" encoding="UTF-8"?>
<dds xmlns="http://www.eprosima.com">
  <profiles>
    <participant profile_name="local" is_default_profile="true">
      <rtps>
        <propertiesPolicy>
          <properties><property><name>fastdds.type_propagation</name><value>disabled</value></property></properties>
        </propertiesPolicy>
      </rtps>
    </participant>
  </profiles>
</dds>
"""
