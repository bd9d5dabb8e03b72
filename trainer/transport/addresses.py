"""The addresses of servers: abstract socket names of this machine, or the hosts and ports of --addresses."""

from __future__ import annotations

import re
import socket as sockets
import sys
from collections.abc import Sequence
from ipaddress import ip_address

from pipeline.core.errors import UsageError

# Abstract socket names: while one process holds such a name, no other can bind it.
PRIVATE = re.compile(r"ipc://@.+")
LOOPBACK = re.compile(r"ipc://.+|tcp://(127\.\d+\.\d+\.\d+|\[::1\]|localhost):\d+")
_TCP = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+)):(\d{1,5})")
ELSEWHERE = ("192.0.2.1", 9)  # reserved for documentation; a route to it uses the interface to other networks
_WAITING = 4096  # connections that may wait while a server restarts; the kernel may allow fewer


def local_addresses(run: str, servers: int) -> list[str]:
    """Return addresses that only this machine can reach: abstract names, which need no file or port, or TCP ports.

    Only Linux has abstract names."""
    if sys.platform == "linux":
        return [f"ipc://@trainer-{run}-{index}" for index in range(servers)]
    return [f"tcp://127.0.0.1:{port}" for port in _free_ports(servers)]


def _free_ports(count: int) -> list[int]:
    """Return TCP ports that are free now. All are bound before any is closed, so that they differ."""
    servers = [sockets.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def hold(address: str) -> sockets.socket | None:
    """Bind a private address and return the listening socket, or None for any other address.

    The supervisor keeps it, so that no other process can bind the address while a server restarts."""
    if not PRIVATE.fullmatch(address):
        return None
    listener = sockets.socket(sockets.AF_UNIX)
    listener.bind("\0" + address.removeprefix("ipc://@"))
    listener.listen(_WAITING)
    return listener


def check_addresses(addresses: Sequence[str], servers: int) -> None:
    """Raise UsageError unless there is one valid tcp:// address per server."""
    if len(addresses) != servers:
        raise UsageError(
            f"--addresses names {len(addresses)} servers, --servers {servers}: give one address per server"
        )
    for address in addresses:
        if not _TCP.fullmatch(address) or not _is_valid(address):
            raise UsageError(f"--addresses: {address!r} is not tcp://HOST:PORT")


def _is_valid(address: str) -> bool:
    """True if the port is in its range and a host in brackets is an IPv6 address."""
    number, _, port = parts_of(address)
    try:
        return (not number or ip_address(number).version == 6) and 0 < int(port) < 1 << 16
    except ValueError:
        return False


def parts_of(address: str) -> tuple[str | None, str, str]:
    """Return (IPv6 address or None, host name or IPv4 address, port) of a TCP address."""
    match = _TCP.fullmatch(address)
    assert match, address
    return match[1], match[2] or "", match[3]


def listening(address: str) -> tuple[str, bool]:
    """Return the address at which libzmq listens, with an IP address instead of a name, and whether it is IPv6.

    Raises UsageError if the host's name is unknown."""
    if not address.startswith("tcp://"):
        return address, False
    number, name, port = parts_of(address)
    if number or _is_number(name):
        return address, bool(number)
    ips = _lookup(name)
    if not ips:
        raise UsageError(f"--addresses: the host {name!r} is not known here")
    at = _plain(ips)[0] if _is_localhost(name) else interface(ips)
    return f"tcp://{at}:{port}", at.startswith("[")


def interface_towards(address: str) -> tuple[sockets.AddressFamily, str]:
    """Return the family and numeric address of the interface of this host that routes to a TCP address. Sends nothing.

    A host name that means loopback here, but is not a loopback address, is the name of this host: other hosts reach it
    by the interface to other networks. Raises UsageError if there is no route to any."""
    number, name, port = parts_of(address)
    family, kind, _, _, target = sockets.getaddrinfo(number or name, port, type=sockets.SOCK_DGRAM)[0]
    with sockets.socket(family, kind) as probe:  # connecting a UDP socket only looks up the route
        probe.connect(target)
        own = str(probe.getsockname()[0])
    if ip_address(own).is_loopback and not LOOPBACK.fullmatch(address):  # the name is loopback on this host only
        with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
            try:
                probe.connect(ELSEWHERE)
            except OSError:
                raise UsageError(
                    f"{name} is a loopback address on this host, which has no route to other networks: give its IP address"
                    " instead of the name"
                ) from None
            return sockets.AF_INET, str(probe.getsockname()[0])
    return sockets.AddressFamily(family), own


def bracketed(host: str) -> str:
    """Return a host as it is written in an address: IPv6 addresses in brackets, anything else unchanged."""
    return f"[{host.strip('[]')}]" if ":" in host else host


def all_interfaces(host: str) -> str:
    """Return the IP address at which to listen for peers that reach this machine as ``host``.

    It stands for all interfaces, unless ``host`` is a loopback address, which only this machine reaches."""
    at = f"tcp://{bracketed(host)}:1"
    if LOOPBACK.fullmatch(at) and host != "localhost":
        return bracketed(host)
    return "[::]" if is_ipv6(at) else "0.0.0.0"


def interface(addresses: Sequence[str]) -> str:
    """Return the IP address at which to listen, given the addresses of a host's name: the first that is not loopback.

    If all are loopback, returns the wildcard address: the name may still lead other hosts here, because Debian's
    /etc/hosts maps a host's own name to a loopback address."""
    ips = _plain(addresses)
    reachable = [ip for ip in ips if not ip_address(ip.strip("[]")).is_loopback]
    if reachable:
        return reachable[0]
    return "[::]" if ips[0].startswith("[") else "0.0.0.0"


def is_ipv6(address: str) -> bool:
    """Return whether an address leads to IPv6 only. An unknown name counts as IPv4."""
    if not address.startswith("tcp://"):
        return False
    number, name, _ = parts_of(address)
    addresses = [] if number else _lookup(name)
    return bool(number) or (bool(addresses) and all(":" in each for each in addresses))


def _plain(addresses: Sequence[str]) -> list[str]:
    """Return the IPv4 addresses if there are any, otherwise the IPv6 addresses in brackets."""
    return [number for number in addresses if ":" not in number] or [f"[{number}]" for number in addresses]


def _is_localhost(name: str) -> bool:
    return re.fullmatch(r"(ip6-)?(localhost|loopback)(\..*)?", name) is not None


def _is_number(name: str) -> bool:
    return re.fullmatch(r"[\d.]+", name) is not None


def _lookup(name: str) -> list[str]:
    """Return the IP addresses of a host's name, none if it is unknown."""
    try:
        return [str(entry[4][0]) for entry in sockets.getaddrinfo(name, None, type=sockets.SOCK_STREAM)]
    except OSError:
        return []
