"""Policies over a network: a websocket server that openpi's client talks to, and a policy that asks such a server.

Requires the extra `serve`.
"""

from importlib.util import find_spec

from mmsdk.errors import InputError

# of our own kind, so that the command line tells it in one line
if find_spec("msgpack") is None or find_spec("websockets") is None:
    raise InputError('it needs msgpack and websockets: pip install ".[serve]" in the clone', item=__name__)
