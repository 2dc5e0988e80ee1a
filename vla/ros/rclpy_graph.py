"""A node by rclpy, over the DDS that is installed with it: `pip install ".[ros]"` in the clone, or a ROS 2 of the machine's own.

rclpy is imported when a graph is made, not before: it is an extra, and its libraries bring an OpenSSL of their own, beside which a TLS that
is loaded later may fail (legalaspro/so101-ros-physical-ai#13). So Python's TLS is imported here first, and a policy that talks TLS is to
be loaded before the graph is made, as `mmsdk ros run` does.
"""

import ssl  # before rclpy, see above
from array import array
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from math import inf, isfinite
from threading import Thread
from typing import Any

from mmsdk.errors import InputError
from mmsdk.vla.ros.graph import Answer, Changed, Heard, Publish, Severity
from mmsdk.vla.ros.messages import Message
from mmsdk.vla.ros.parameters import Parameter, Parameters, Value
from mmsdk.vla.ros.qos import Qos, qos_of
from mmsdk.vla.ros.rebuild import rclpy_messages, rebuilt

__all__ = ["TLS", "RclpyGraph", "ros_class"]

TLS = ssl.OPENSSL_VERSION
"""The OpenSSL that Python's own TLS goes by, loaded before rclpy's."""


def ros_class(name: str) -> Any:
    """The class of rclpy's that has a type's name: "sensor_msgs/msg/Image". Raises InputError, naming the package, where it is missing."""
    package, kind, short = name.split("/")
    if find_spec(package) is None:
        raise InputError(
            f"the messages of {package} are not installed; pip install '.[ros]' in the clone, or source the ROS that has them", item=name
        )
    return vars(import_module(f"{package}.{kind}"))[short]


class RclpyGraph:
    """See `Graph`. Its context is its own: it takes no signals, and nothing of the command line."""

    def __init__(self, node: str, overrides: Mapping[str, object] = {}, domain: int | None = None) -> None:
        """`node` is the node's full name ("/arm/policy"); `overrides` are parameters that rclpy declares itself, as use_sim_time.

        `domain`: as ROS_DOMAIN_ID; none takes that. Raises InputError where rclpy is not installed, and for a name that is none.
        """
        if find_spec("rclpy") is None:
            raise InputError(
                "rclpy is not installed; pip install '.[ros]' in the clone (Python 3.11), or source the machine's ROS 2", item="ros"
            )
        namespace, _, name = ("/" + node.strip("/")).rpartition("/")
        self._rclpy = import_module("rclpy")
        self._context = import_module("rclpy.context").Context()
        # its own handlers would close the context before the robot has come to rest
        no_signals = import_module("rclpy.signals").SignalHandlerOptions.NO
        self._rclpy.init(args=[], context=self._context, domain_id=domain, signal_handler_options=no_signals)
        parameter = import_module("rclpy.parameter").Parameter
        given = [parameter(key, value=value) for key, value in overrides.items()]
        try:
            self._node = self._rclpy.create_node(name, namespace=namespace, context=self._context, parameter_overrides=given)
        except import_module("rclpy.exceptions").NameValidationException as error:
            self._context.shutdown()
            raise InputError(f"is no name of a node: {' '.join(str(error).split())}", item=node) from None
        self._target = rclpy_messages(ros_class)
        # one thread: rclpy's pool waits in Python, takes a whole core, and holds the interpreter that the loop needs
        self._executor = import_module("rclpy.executors").SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self._node)
        self._spinning = Thread(target=self._executor.spin, name="rclpy", daemon=True)
        self._spinning.start()

    def subscribe(self, topic: str, ros_type: str, qos: Qos, heard: Heard) -> Callable[[], None]:
        """See `Graph`. A publisher whose policies do not fit is told of in the log, by rclpy itself."""
        made = self._node.create_subscription(ros_class(ros_type), topic, heard, _profile(qos))
        return lambda: self._node.destroy_subscription(made)

    def advertise(self, topic: str, ros_type: str, qos: Qos) -> tuple[Publish, Callable[[], None]]:
        """See `Graph`."""
        publisher = self._node.create_publisher(ros_class(ros_type), topic, _profile(qos))

        def publish(message: Message) -> None:
            publisher.publish(rebuilt(message, self._target))

        return publish, lambda: self._node.destroy_publisher(publisher)

    def serve(self, name: str, ros_type: str, answer: Answer) -> None:
        """See `Graph`."""
        self._node.create_service(ros_class(ros_type), name, answer)

    def declare(self, declared: Sequence[Parameter], parameters: Parameters, changed: Changed) -> None:
        """See `Graph`. What rclpy has declared itself keeps what it was made with."""
        for parameter in declared:
            if not self._node.has_parameter(parameter.name):
                value = _plain(parameters.value(parameter.name))
                self._node.declare_parameter(parameter.name, _typed(parameter, value), _descriptor(parameter))
        known = {parameter.name for parameter in declared}
        result = ros_class("rcl_interfaces/msg/SetParametersResult")

        def judge(wanted: Sequence[Any]) -> Any:
            changes = {each.name: each.value for each in wanted if each.name in known}
            try:
                changed({name: tuple(value) if isinstance(value, list | array) else value for name, value in changes.items()})
            except InputError as error:
                return result(successful=False, reason=str(error))
            return result(successful=True)

        self._node.add_on_set_parameters_callback(judge)

    def offers(self, topic: str) -> tuple[Qos, ...]:
        """See `Graph`."""
        return tuple(qos_of(each.qos_profile) for each in self._node.get_publishers_info_by_topic(topic))

    def log(self, severity: Severity, text: str) -> None:
        """See `Graph`: on stderr, and on /rosout."""
        logger = self._node.get_logger()
        # rclpy takes one line of a program for one severity
        match severity:
            case "info":
                logger.info(text)
            case "warn":
                logger.warning(text)
            case "error":
                logger.error(text)

    def close(self) -> None:
        """See `Graph`."""
        self._executor.shutdown()
        self._spinning.join()
        self._node.destroy_node()
        self._context.shutdown()


def _profile(qos: Qos) -> Any:
    """A `Qos` as rclpy's QoSProfile."""
    policies, duration = import_module("rclpy.qos"), import_module("rclpy.duration").Duration
    lasting = {"deadline": qos.deadline, "lifespan": qos.lifespan, "liveliness_lease_duration": qos.lease}
    return policies.QoSProfile(
        depth=qos.depth,
        history=policies.HistoryPolicy.KEEP_LAST if qos.depth else policies.HistoryPolicy.KEEP_ALL,
        reliability=policies.ReliabilityPolicy[qos.reliability.upper()],
        durability=policies.DurabilityPolicy[qos.durability.upper()],
        liveliness=policies.LivelinessPolicy[qos.liveliness.upper()],
        **{name: duration(seconds=length) for name, length in lasting.items() if length < inf},
    )


def _plain(value: Value) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _typed(parameter: Parameter, value: Any) -> Any:
    """A value as rclpy declares it; of an empty list, which does not tell of what it is one, the type alone."""
    return value if value != [] else vars(import_module("rclpy.parameter"))["Parameter"].Type[parameter.kind.upper()]


def _descriptor(parameter: Parameter) -> Any:
    found = ros_class("rcl_interfaces/msg/ParameterDescriptor")(description=parameter.description, read_only=parameter.read_only)
    # ROS knows no range that is open on one side
    if isfinite(parameter.low) and isfinite(parameter.high) and parameter.kind == "double":
        found.floating_point_range = [ros_class("rcl_interfaces/msg/FloatingPointRange")(from_value=parameter.low, to_value=parameter.high)]
    if isfinite(parameter.low) and isfinite(parameter.high) and parameter.kind == "integer":
        span = ros_class("rcl_interfaces/msg/IntegerRange")(from_value=int(parameter.low), to_value=int(parameter.high))
        found.integer_range = [span]
    if parameter.choices:
        found.additional_constraints = f"one of {', '.join(parameter.choices)}"
    return found
