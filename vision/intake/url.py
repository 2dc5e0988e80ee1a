"""http(s) addresses: off unless their hosts are allowed, and then fetched from the very address that was checked.

A name is resolved once for each hop, every address that it resolves to is checked, and the connection goes to one of those: a resolver
that answers differently the next time (DNS rebinding) is never asked again. Redirects are off by default; each one that is followed
passes the same checks.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from mmsdk.errors import InputError
from mmsdk.vision.intake.access import PORTS, Access
from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.values import cause

__all__ = ["Resolve", "fetch", "resolve"]

Resolve = Callable[[str, int], list[str]]
"""(host, port) -> the host's addresses."""

_MOVED = {301, 302, 303, 307, 308}


def resolve(host: str, port: int) -> list[str]:
    """The addresses that this machine's resolver knows for a host."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def fetch(url: str, access: Access, limits: Limits, resolver: Resolve = resolve) -> bytes:
    """What is at `url`, at most `limits.held_bytes`.

    Raises InputError, naming the address without its query, where it may not be reached, does not answer with 200, is too large, or is
    not complete within `access.seconds`.
    """
    deadline = _Deadline(access.seconds, access.ways.slow)
    for _ in range(access.redirects + 1):
        item = _shown(url)
        parts, host, port = _parsed(url, item)
        if not access.admits(host, port):
            told = f"{host}:{port} is not among the hosts that may be fetched from"
            raise InputError(f"{told}; {access.opening(host, port, _known(host, port, resolver))}", item=item)
        addresses = _checked(host, port, access, resolver, item)
        answer = _get(parts, host, port, addresses, deadline, limits, item)
        if isinstance(answer, bytes):
            return answer
        target = urljoin(url, answer)
        if parts.scheme == "https" and not target.lower().startswith("https:"):
            raise InputError("redirects from https to an address that is not https", item=item)
        url = target
    told = f"redirects further than is followed (at most {access.redirects}), to {_shown(url)}"
    raise InputError(f"{told}; {access.ways.redirect}", item=item)


def _shown(url: str) -> str:
    """The address for messages: without query, fragment or password, which may be secret."""
    before, _, rest = url.partition("://")
    return f"{before}://{rest.partition('?')[0].partition('#')[0].rpartition('@')[2]}"[:200]


def _parsed(url: str, item: str) -> tuple[SplitResult, str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or PORTS.get(parts.scheme, 0)
        host = (parts.hostname or "").rstrip(".").encode("idna").decode("ascii").lower()
    except ValueError as error:
        raise InputError(f"not an address that can be read: {error}", item=item) from None
    if parts.scheme not in PORTS or not host:
        raise InputError("only http and https addresses with a host are fetched", item=item)
    if parts.username is not None:
        raise InputError("addresses with a user name are not fetched", item=item)
    return parts, host, port


def _known(host: str, port: int, resolver: Resolve) -> list[str]:
    """Where a host is that may not be asked about: an address is there itself, and this machine needs no asking."""
    with suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    with suppress(OSError):
        return resolver(host, port) if host == "localhost" else []
    return []


def _checked(host: str, port: int, access: Access, resolver: Resolve, item: str) -> list[str]:
    try:
        addresses = list(dict.fromkeys(resolver(host, port)))
    except (OSError, UnicodeError) as error:
        raise InputError(f"the host {host} is not known: {cause(error)}", item=item) from None
    if not addresses:
        raise InputError(f"the host {host} has no address", item=item)
    for address in addresses:
        if not access.reaches(address):
            raise InputError(f"{host} is at {address}, which is not public; {access.opening(host, port, addresses)}", item=item)
    return addresses


def _get(parts: SplitResult, host: str, port: int, addresses: list[str], deadline: "_Deadline", limits: Limits, item: str) -> bytes | str:
    """The body of the answer, or the address that it redirects to."""
    try:
        with deadline.connection(addresses, port) as raw, _secured(raw, host, parts.scheme) as wire:
            answer = _ask(wire, parts, host, port, limits, item)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if not deadline.over:
            raise error if isinstance(error, InputError) else InputError(f"cannot be fetched: {cause(error)}", item=item) from None
    # a body of untold length that was cut off looks whole
    if deadline.over:
        raise InputError(f"not complete within {deadline.seconds:g} s; {deadline.way}", item=item)
    return answer


def _secured(raw: socket.socket, host: str, scheme: str) -> socket.socket:
    return ssl.create_default_context().wrap_socket(raw, server_hostname=host) if scheme == "https" else raw


def _ask(wire: socket.socket, parts: SplitResult, host: str, port: int, limits: Limits, item: str) -> bytes | str:
    connection = http.client.HTTPConnection(host, port)
    connection.sock = wire
    named = (f"[{host}]" if ":" in host else host) + ("" if port == PORTS[parts.scheme] else f":{port}")
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + ("?" + quote(parts.query, safe="/%:@!$&'()*+,;=~?") if parts.query else "")
    # an answer that is packed could unfold to any size
    connection.request("GET", target, headers={"Host": named, "Accept-Encoding": "identity", "User-Agent": "mmsdk"})
    with connection.getresponse() as answer:
        if answer.status in _MOVED:
            return _location(answer, item)
        if answer.status != http.client.OK:
            raise InputError(f"answered {answer.status} {answer.reason}".strip()[:100], item=item)
        if answer.getheader("Content-Encoding", "identity").lower() != "identity":
            raise InputError("answered with packed content, which was not asked for", item=item)
        limits.check_bytes(answer.length or 0, item)
        body = answer.read(limits.held_bytes + 1)
        limits.check_bytes(len(body), item)
        if answer.length:
            raise InputError(f"the connection ended {answer.length:,} bytes early", item=item)
        return body


def _location(answer: http.client.HTTPResponse, item: str) -> str:
    location = answer.getheader("Location")
    if not location:
        raise InputError(f"answered {answer.status} without saying where to", item=item)
    return location


class _Deadline:
    """Cuts the connection when the time for the whole transfer is over, however slowly its bytes trickle in."""

    def __init__(self, seconds: float, way: str) -> None:
        self.seconds, self.way = seconds, way
        self._end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether the time has passed."""
        return time.monotonic() >= self._end

    @contextmanager
    def connection(self, addresses: list[str], port: int) -> Iterator[socket.socket]:
        """A connection to the first address that takes one, cut when the time is over."""
        with self._connected(addresses, port) as wire, wire.dup() as cutter:
            timer = threading.Timer(max(0.0, self._end - time.monotonic()), _cut, [cutter])
            timer.daemon = True
            timer.start()
            try:
                yield wire
            finally:
                timer.cancel()
                timer.join()

    def _connected(self, addresses: list[str], port: int) -> socket.socket:
        for place, address in enumerate(addresses):
            try:
                return socket.create_connection((address, port), timeout=max(0.001, self._end - time.monotonic()))
            except OSError:
                if self.over or place == len(addresses) - 1:
                    raise
        raise AssertionError("there is at least one address")


def _cut(wire: socket.socket) -> None:
    # TLS keeps the socket for itself; a second handle on the same connection can end it all the same
    with suppress(OSError):
        wire.shutdown(socket.SHUT_RDWR)
