"""Bytes of answers: what frames parts of a body quickly says the same as h11 itself."""

from __future__ import annotations

import h11
from hypothesis import given
from hypothesis import strategies as st

from headrace.server.http_protocol import _BoundedConnection

HEADERS = st.sampled_from(([], [("Content-Length", "{size}")], [("Transfer-Encoding", "chunked")]))


def sent(connection: h11.Connection, ask: bytes, headers: list[tuple[str, str]], parts: list[bytes]) -> bytes:
    connection.receive_data(ask)
    connection.next_event()
    whole = [(name, value.format(size=sum(map(len, parts)))) for name, value in headers]
    events = [h11.Response(status_code=200, headers=whole), *map(h11.Data, parts), h11.EndOfMessage()]
    return b"".join(connection.send(event) or b"" for event in events)


@given(HEADERS, st.lists(st.binary(max_size=40), max_size=5), st.sampled_from(("1.0", "1.1")), st.integers(1, 3))
def test_the_bytes_are_those_of_h11(
    headers: list[tuple[str, str]], parts: list[bytes], version: str, times: int
) -> None:
    ours, theirs = _BoundedConnection(h11.SERVER), h11.Connection(h11.SERVER)
    ask = f"GET / HTTP/{version}\r\nHost: a\r\n\r\n".encode()
    for _ in range(times):
        assert sent(ours, ask, headers, parts) == sent(theirs, ask, headers, parts)
        assert ours.our_state is theirs.our_state
        if ours.our_state is not h11.DONE:
            return
        for connection in (ours, theirs):
            connection.next_event()
            connection.start_next_cycle()


def test_the_answer_to_head_has_no_body() -> None:
    assert sent(_BoundedConnection(h11.SERVER), b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n", [], [b""]).endswith(b"\r\n\r\n")
