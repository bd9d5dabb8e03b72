"""Where servers are found: at abstract names that only this machine knows, or at the hosts and ports of --addresses."""

from __future__ import annotations

import re
import socket as sockets
import sys
from collections.abc import Sequence
from ipaddress import ip_address

from pipeline.core.errors import UsageError

# Names of this machine that no other process can take, nor listen at, while one process holds them.
PRIVATE = re.compile(r"ipc://@.+")
LOOPBACK = re.compile(r"ipc://.+|tcp://(127\.\d+\.\d+\.\d+|\[::1\]|localhost):\d+")
_TCP = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+)):(\d{1,5})")
_WAITING = 4096  # connections while a server starts again; the kernel may allow fewer


def local_addresses(run: str, servers: int) -> list[str]:
    """Addresses that only this machine reaches: abstract names, which leave no file and no port; elsewhere ports."""
    if sys.platform == "linux":
        return [f"ipc://@trainer-{run}-{index}" for index in range(servers)]
    return [f"tcp://127.0.0.1:{port}" for port in _free_ports(servers)]


def _free_ports(count: int) -> list[int]:
    held = [sockets.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports


def hold(address: str) -> sockets.socket | None:
    """Listen at a private address from now on, whichever server is there to accept: so nobody else can, while one is
    started again. None for any other address."""
    if not PRIVATE.fullmatch(address):
        return None
    held = sockets.socket(sockets.AF_UNIX)
    held.bind("\0" + address.removeprefix("ipc://@"))
    held.listen(_WAITING)
    return held


def check_addresses(addresses: Sequence[str], servers: int) -> None:
    """Raises UsageError."""
    if len(addresses) != servers:
        raise UsageError(f"--addresses names {len(addresses)} servers, --servers {servers}: give one address a server")
    for address in addresses:
        if not _TCP.fullmatch(address) or not _is_valid(address):
            raise UsageError(f"--addresses: {address!r} is not tcp://HOST:PORT")


def _is_valid(address: str) -> bool:
    number, _, port = parts_of(address)
    try:
        return (not number or ip_address(number).version == 6) and 0 < int(port) < 1 << 16
    except ValueError:
        return False


def parts_of(address: str) -> tuple[str | None, str, str]:
    """(number of IPv6, name or number of IPv4, port) of a TCP address."""
    found = _TCP.fullmatch(address)
    assert found, address
    return found[1], found[2] or "", found[3]


def listening(address: str) -> tuple[str, bool]:
    """What libzmq, which listens at numbers only, is told for an address, and whether that is IPv6. Raises UsageError."""
    if not address.startswith("tcp://"):
        return address, False
    number, name, port = parts_of(address)
    if number or _is_number(name):
        return address, bool(number)
    found = _lookup(name)
    if not found:
        raise UsageError(f"--addresses: the host {name!r} is not known here")
    at = _plain(found)[0] if _is_localhost(name) else interface(found)
    return f"tcp://{at}:{port}", at.startswith("[")


def bracketed(host: str) -> str:
    """A host's name or number as addresses have it."""
    return f"[{host.strip('[]')}]" if ":" in host else host


def all_interfaces(host: str) -> str:
    """Where to listen for whoever reaches this machine by a name or number: only here where that leads nowhere else."""
    at = f"tcp://{bracketed(host)}:1"
    if LOOPBACK.fullmatch(at) and host != "localhost":
        return bracketed(host)
    return "[::]" if is_ipv6(at) else "0.0.0.0"


def interface(found: Sequence[str]) -> str:
    """Where to listen, of the numbers that a host's name has: at the first that others reach.

    A name that leads this host to itself may lead others here (Debian has such a line in /etc/hosts): then everywhere."""
    numbers = _plain(found)
    reached = [number for number in numbers if not ip_address(number.strip("[]")).is_loopback]
    return reached[0] if reached else "[::]" if numbers[0].startswith("[") else "0.0.0.0"


def is_ipv6(address: str) -> bool:
    """Whether an address leads to IPv6 only. A name that is not known yet counts as one of IPv4."""
    if not address.startswith("tcp://"):
        return False
    number, name, _ = parts_of(address)
    found = [] if number else _lookup(name)
    return bool(number) or (bool(found) and all(":" in each for each in found))


def _plain(found: Sequence[str]) -> list[str]:
    """Numbers of IPv4 if there are any, else those of IPv6 as addresses have them."""
    return [number for number in found if ":" not in number] or [f"[{number}]" for number in found]


def _is_localhost(name: str) -> bool:
    return re.fullmatch(r"(ip6-)?(localhost|loopback)(\..*)?", name) is not None


def _is_number(name: str) -> bool:
    return re.fullmatch(r"[\d.]+", name) is not None


def _lookup(name: str) -> list[str]:
    """The numbers of a host's name; none where it is not known."""
    try:
        return [str(entry[4][0]) for entry in sockets.getaddrinfo(name, None, type=sockets.SOCK_STREAM)]
    except OSError:
        return []
