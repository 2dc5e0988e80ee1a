"""Pictures and clips from the web: off until hosts are allowed, and never a way into a private network.

Every hop of a redirect is checked anew: its scheme, its host against the allow-list, every address that its name resolves to. The name is
resolved once, and the connection goes to the address that was checked, so that a second answer of the resolver changes nothing.
"""

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from mmsdk.errors import InputError
from mmsdk.vision.intake.limits import Limits

__all__ = ["Web", "fetch", "resolve"]

REDIRECTS = (301, 302, 303, 307, 308)
NAT64 = ipaddress.ip_network("64:ff9b::/96")


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, by the system's resolver."""
    return [str(answer[4][0]) for answer in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


@dataclass(frozen=True, slots=True)
class Web:
    """What may be fetched: nothing by default, only from the host names in `hosts` otherwise.

    `private` are networks ("127.0.0.1/32") that may be reached though they are not public. At most `redirects` are followed; `timeout`
    is in seconds and holds for each read.
    """

    hosts: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    redirects: int = 3
    timeout: float = 10.0
    resolver: Callable[[str, int], list[str]] = resolve


def fetch(url: str, web: Web, limits: Limits) -> bytes:
    """The bytes behind an http(s) address. Raises InputError for what is not allowed, fails, or is larger than `limits.bytes`."""
    for _ in range(web.redirects + 1):
        address = _checked(url, web)
        try:
            found = _get(url, address, web, limits)
        except (OSError, http.client.HTTPException) as error:
            raise InputError(f"cannot be fetched ({error})", item=url) from error
        if isinstance(found, bytes):
            return found
        url = found
    raise InputError(f"more than {web.redirects} redirects", item=url)


class _Pinned(http.client.HTTPConnection):
    """A connection to the address that was checked, whatever the name resolves to by now."""

    def __init__(self, parts: SplitResult, address: str, timeout: float) -> None:
        super().__init__(parts.hostname or "", parts.port or _port(parts), timeout=timeout)
        self._address = address
        self._secure = parts.scheme == "https"

    def connect(self) -> None:
        plain = socket.create_connection((self._address, self.port), self.timeout)
        self.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=self.host) if self._secure else plain


def _port(parts: SplitResult) -> int:
    return 443 if parts.scheme == "https" else 80


def _checked(url: str, web: Web) -> str:
    """The address to connect to, after scheme, host and addresses were found to be allowed."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or _port(parts)
    except ValueError as error:
        raise InputError(f"this is no address ({error})", item=url) from error
    if parts.scheme not in ("http", "https") or host not in web.hosts:
        allowed = ", ".join(web.hosts) or "none"
        raise InputError(f"the host {host!r} is not allowed (allowed: {allowed}); pass web=Web(hosts=(...)) or the bytes", item=url)
    try:
        addresses = web.resolver(host, port)
    except OSError as error:
        raise InputError(f"the host {host!r} does not resolve ({error})", item=url) from error
    refused = [address for address in addresses if not _permitted(address, web)]
    if refused or not addresses:
        raise InputError(f"the host {host!r} leads to {refused or 'no address'}, which is not public; refused", item=url)
    return addresses[0]


def _permitted(address: str, web: Web) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        # an IPv4 address may hide inside an IPv6 one
        ip = ip.ipv4_mapped or ip.sixtofour or (ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in NAT64 else ip)
    allowed = [ipaddress.ip_network(network) for network in web.private]
    return any(ip in network for network in allowed) or (ip.is_global and not ip.is_multicast)


def _get(url: str, address: str, web: Web, limits: Limits) -> bytes | str:
    """The body, or where the answer redirects to."""
    parts = urlsplit(url)
    connection = _Pinned(parts, address, web.timeout)
    try:
        connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), headers={"User-Agent": "mmsdk"})
        answer = connection.getresponse()
        if answer.status in REDIRECTS:
            return urljoin(url, answer.getheader("Location") or "")
        if answer.status != 200:
            raise InputError(f"the server answers {answer.status} {answer.reason}", item=url)
        body = answer.read(limits.bytes + 1)
        limits.check_bytes(len(body), url)
        if not body or (answer.length or 0) > 0:
            raise InputError("the answer is empty or ends before its announced length (truncated)", item=url)
        return body
    finally:
        connection.close()
