"""`mmsdk ros run|simulate --params robot.yaml`: a policy as a ROS 2 node, and a simulated arm to try it with.

It is `mmsdk.apps.robots.ros`, imported when it is asked for, for it needs an extra.
"""

import argparse

from mmsdk.apps.loading import needing

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Do what was asked for. Raises InputError, naming the extra, where a package is missing."""
    code: int = needing("mmsdk.apps.robots.ros", "ros", args.action).run(args)
    return code
