"""Keeps the tests off the network: any attempt to leave the machine is stopped and remembered; loopback is free.

An audit hook sees every connect, send and name look-up that goes through Python's sockets, in any thread and on any
event loop; uvloop does its own in C, so its entry points are wrapped. A test that leaves the machine fails even where
the library that tried swallows the error, because the attempt is remembered and the fixture in conftest.py looks.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["NetworkBlocked", "attempts", "install"]

attempts: list[str] = []
"""What was stopped since the list was last cleared."""

_SENDS = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg"})
_LOOK_UPS = frozenset({"socket.getaddrinfo", "socket.gethostbyname"})
# What uvloop does in C, with the place and the name of the argument that says where to.
_UVLOOP_ROADS = {
    "create_connection": (1, "host"),
    "create_datagram_endpoint": (2, "remote_addr"),
    "getaddrinfo": (0, "host"),
}
_INTERNET = (socket.AF_INET, socket.AF_INET6)


class NetworkBlocked(OSError):
    """A test tried to leave the machine. An `OSError`, so that whoever tried cleans up as after any failed connect."""


def install() -> None:
    """Guard this process for the rest of its life; an audit hook cannot be taken back."""
    sys.addaudithook(_audit)
    try:
        import uvloop
    except ImportError:
        return
    for name, parameter in _UVLOOP_ROADS.items():
        setattr(uvloop.Loop, name, _guarded(getattr(uvloop.Loop, name), *parameter))


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in _SENDS:
        sock, address = args
        if sock.family in _INTERNET and isinstance(address, tuple) and not _is_local(address[0]):
            _stop(f"{event} {address!r}")
    elif event in _LOOK_UPS and not _needs_no_look_up(args[0]):
        _stop(f"{event} {args[0]!r}")


def _guarded(method: Callable[..., Awaitable[Any]], place: int, keyword: str) -> Callable[..., Awaitable[Any]]:
    """Wrap a coroutine method of uvloop's loop that takes a host, or an address, as that argument."""
    allowed = _needs_no_look_up if method.__name__ == "getaddrinfo" else _is_local

    @functools.wraps(method)
    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        target = args[place] if len(args) > place else kwargs.get(keyword)
        host = target[0] if isinstance(target, tuple) else target
        if host is not None and not allowed(host):
            _stop(f"uvloop {method.__name__} {host!r}")
        return await method(self, *args, **kwargs)

    return wrapper


def _stop(what: str) -> None:
    attempts.append(what)
    raise NetworkBlocked(f"tests never touch the network, but this one tried: {what}")


def _needs_no_look_up(host: object) -> bool:
    """An address in digits is read, not looked up; so are nothing at all and the name of this machine's loopback."""
    if host is None or host in ("", b"", "localhost", b"localhost"):
        return True
    return _address(host) is not None


def _is_local(host: object) -> bool:
    if host in ("", "localhost", b"localhost"):
        return True
    address = _address(host)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    return address is not None and address.is_loopback


def _address(host: object) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    text = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host)
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
