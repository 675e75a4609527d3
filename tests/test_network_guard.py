"""The network guard stops what leaves the machine, on every road out, and lets loopback pass."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import anyio
import pytest
from anyio.abc import SocketAttribute
from network_guard import NetworkBlocked

# Reserved for documentation: nothing answers there, even with the guard broken.
OUTSIDE = "192.0.2.1"
NAME = "outside.invalid"


def udp(send: Callable[[socket.socket], object]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        send(sock)


ROADS = {
    "connect": lambda: udp(lambda sock: sock.connect((OUTSIDE, 9))),
    "connect_ex": lambda: udp(lambda sock: sock.connect_ex((OUTSIDE, 9))),
    "sendto": lambda: udp(lambda sock: sock.sendto(b"x", (OUTSIDE, 9))),
    "sendto with flags": lambda: udp(lambda sock: sock.sendto(b"x", 0, (OUTSIDE, 9))),
    "sendmsg": lambda: udp(lambda sock: sock.sendmsg([b"x"], [], 0, (OUTSIDE, 9))),
    "create_connection": lambda: socket.create_connection((OUTSIDE, 9), timeout=0.1),
    "getaddrinfo": lambda: socket.getaddrinfo(NAME, 80),
    "gethostbyname": lambda: socket.gethostbyname(NAME),
}


@pytest.mark.parametrize("road", ROADS)
def test_stops_every_road_out(road: str, network_attempts: list[str]) -> None:
    with pytest.raises(NetworkBlocked):
        ROADS[road]()
    assert len(network_attempts) == 1
    network_attempts.clear()


def test_remembers_an_attempt_in_a_thread_that_swallows_the_error(network_attempts: list[str]) -> None:
    def worker() -> None:
        with suppress(OSError):
            socket.create_connection((OUTSIDE, 9), timeout=0.1)

    thread = threading.Thread(target=worker)
    thread.start()
    thread.join()
    assert network_attempts == [f"socket.connect ('{OUTSIDE}', 9)"]
    network_attempts.clear()


@pytest.mark.anyio
@pytest.mark.parametrize("host", [OUTSIDE, NAME])
async def test_stops_a_connect_on_every_event_loop(host: str, network_attempts: list[str]) -> None:
    with pytest.raises(OSError), anyio.fail_after(2):
        await anyio.connect_tcp(host, 9)
    assert network_attempts
    network_attempts.clear()


@pytest.mark.parametrize("host", [OUTSIDE, NAME])
@pytest.mark.parametrize("keyword", [True, False])
def test_stops_a_connect_that_uvloop_does_in_c(host: str, keyword: bool, network_attempts: list[str]) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def connect() -> None:
        loop = asyncio.get_running_loop()
        if keyword:
            await loop.create_connection(asyncio.Protocol, host=host, port=9)
        else:
            await loop.create_connection(asyncio.Protocol, host, 9)

    with pytest.raises(NetworkBlocked):
        uvloop.run(asyncio.wait_for(connect(), 2))
    assert len(network_attempts) == 1
    network_attempts.clear()


@pytest.mark.anyio
async def test_stops_a_datagram_on_every_event_loop(network_attempts: list[str]) -> None:
    with pytest.raises(OSError), anyio.fail_after(2):
        await anyio.create_connected_udp_socket(OUTSIDE, 9)
    assert network_attempts
    network_attempts.clear()


@pytest.mark.anyio
async def test_lets_loopback_pass() -> None:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(SocketAttribute.local_port)
    async with await anyio.connect_tcp("localhost", port, happy_eyeballs_delay=1):
        pass
    async with await anyio.connect_tcp("127.0.0.1", port):
        pass
    await listener.aclose()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost"])
def test_lets_a_loopback_datagram_pass(host: str, network_attempts: list[str]) -> None:
    udp(lambda sock: sock.sendto(b"x", (host, 9)))
    assert network_attempts == []
