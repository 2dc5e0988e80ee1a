"""What a source may reach beyond the bytes that it hands over: which hosts, which networks, which files."""

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass

from mmsdk.errors import InputError
from mmsdk.vision.values import real, shown, whole

__all__ = ["ACCESS", "PORTS", "Access", "Ways"]

PORTS = {"http": 80, "https": 443}
LONGEST = 1e6
_LOCAL = ipaddress.IPv6Network("64:ff9b:1::/48")  # of a network's own translators (RFC 8215), which not every Python knows
# Of NAT64, "IPv4-compatible" and "IPv4-translated": an IPv4 address stands in the last four bytes.
_CARRIERS = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96")))


@dataclass(frozen=True, slots=True)
class Ways:
    """What messages tell to do about what may not be reached: each program has ways of its own; these are Python's.

    "HOST" in them stands for the host that was asked for, "ADDRESS" for where it is: of several addresses, with `between` between them.
    """

    host: str = 'allow it: mmsdk.load(address, access=mmsdk.Access(hosts=("HOST",)))'
    network: str = 'allow its network: mmsdk.Access(hosts=("HOST",), networks=("ADDRESS",))'
    between: str = '", "'
    redirect: str = "mmsdk.Access(redirects=...) follows more"
    slow: str = "mmsdk.Access(seconds=...) waits longer"


@dataclass(frozen=True, slots=True)
class Access:
    """What sources may reach beyond what they hand over themselves. The default is nothing.

    `hosts`: names that may be fetched from by http or https: "images.example.org", "*.example.org" (any name below it), "*" (any), with
    ":port" for ports other than 80 and 443. `networks`: networks that count as public although they are not, such as "10.1.0.0/16".
    `redirects`: how many are followed. `seconds`: for the whole transfer, redirects included. `files`: whether file: addresses are read.
    `ways`: what messages tell to do about what may not be reached.
    """

    hosts: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    redirects: int = 0
    seconds: float = 10.0
    files: bool = False
    ways: Ways = Ways()

    def __post_init__(self) -> None:
        _check_several("hosts", self.hosts, "images.example.org")
        _check_several("networks", self.networks, "10.1.0.0/16")
        if not all(isinstance(host, str) for host in self.hosts):
            raise InputError(f"hosts is {shown(self.hosts)}, expected names such as images.example.org", item="access")
        if not whole(self.redirects, 0):
            raise InputError(f"redirects is {shown(self.redirects)}, expected a whole number of at least 0", item="access")
        if not 0 < real(self.seconds) <= LONGEST:
            raise InputError(f"seconds is {shown(self.seconds)}, expected a number above 0 and up to {LONGEST:,.0f}", item="access")
        try:
            for network in self.networks:
                ipaddress.ip_network(network)
        except ValueError as error:
            raise InputError(f"networks are written like 10.1.0.0/16: {error}", item="access") from None

    def admits(self, host: str, port: int) -> bool:
        """Whether `hosts` names this host at this port."""
        usual = port in PORTS.values()
        names = [entry.removesuffix(f":{port}") for entry in self.hosts if entry.endswith(f":{port}") or (usual and ":" not in entry)]
        return any(name == "*" or name.lower() == host or (name[:2] == "*." and host.endswith(name[1:].lower())) for name in names)

    def reaches(self, address: str) -> bool:
        """Whether a connection to this address is allowed: it is public, or in one of `networks`."""
        seen = _seen(address)
        inside = any(seen in network for network in map(ipaddress.ip_network, self.networks) if network.version == seen.version)
        return inside or (seen.is_global and not seen.is_multicast and seen not in _LOCAL)

    def opening(self, host: str, port: int, addresses: Collection[str]) -> str:
        """What to do so that this host, which is at these addresses, may be fetched from."""
        # what is allowed without a port is a name, in which there is no colon
        named = host if port in PORTS.values() and ":" not in host else f"{host}:{port}"
        closed = [str(_seen(address)) for address in addresses if not self.reaches(address)]
        if not closed:
            return self.ways.host.replace("HOST", named)
        return self.ways.network.replace("HOST", named).replace("ADDRESS", self.ways.between.join(dict.fromkeys(closed)))


def _check_several(name: str, value: object, written: str) -> None:
    # a string would be taken apart into its letters
    if not isinstance(value, Collection) or isinstance(value, str | bytes):
        raise InputError(f'{name} is {shown(value)}, expected a tuple, as in ("{written}",)', item="access")


def _seen(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return _unwrapped(ipaddress.ip_address(address.partition("%")[0]))


def _unwrapped(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IPv4 address inside an IPv6 address that only carries one."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if any(address in carrier for carrier in _CARRIERS) and not (address.is_loopback or address.is_unspecified):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


ACCESS = Access()
