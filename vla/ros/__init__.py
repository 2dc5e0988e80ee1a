"""ROS 2 without a ROS installation: messages in and out by shape, time, transforms, QoS, lifecycle and parameters by ROS's own rules."""
