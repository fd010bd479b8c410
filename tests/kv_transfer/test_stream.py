"""Socket calls that the transports rely on."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from kv_transfer.transport import ConnectionLost
from kv_transfer.transports.stream import SocketAcceptor, SocketStream


def pair() -> tuple[SocketStream, SocketStream]:
    ours, theirs = socket.socketpair()
    return SocketStream(ours), SocketStream(theirs)


def test_hang_up_shows_before_unread_bytes_are_read() -> None:
    ours, theirs = pair()
    theirs.send([b"x" * 100])
    assert not ours.hung_up()
    theirs.shutdown()
    assert ours.hung_up()
    assert ours.receive(100) == b"x" * 100
    with pytest.raises(ConnectionLost):
        ours.receive(1)
    ours.close()
    theirs.close()


def test_more_parts_than_one_call_takes_arrive_in_order() -> None:
    ours, theirs = pair()
    parts = [bytes([number % 256]) * (number % 700) for number in range(3000)]
    received: list[bytes] = []
    total = sum(map(len, parts))
    reader = threading.Thread(target=lambda: received.append(ours.receive(total)))
    reader.start()
    theirs.send(parts)
    reader.join()
    assert received == [b"".join(parts)]
    ours.close()
    theirs.close()


def test_receiving_now_never_waits() -> None:
    ours, theirs = pair()
    target = bytearray(10)
    assert ours.receive_now([memoryview(target)]) == 0
    theirs.send([b"abc"])
    ours.wait_readable()
    assert ours.receive_now([memoryview(target)[:1], memoryview(target)[5:]]) == 3
    assert bytes(target) == b"a\0\0\0\0bc\0\0\0"
    theirs.shutdown()
    ours.wait_readable()
    with pytest.raises(ConnectionLost):
        ours.receive_now([memoryview(target)])
    ours.close()
    theirs.close()


def test_shutdown_wakes_a_sender_and_a_reader() -> None:
    ours, theirs = pair()
    errors: list[Exception] = []

    def run(call: object, *arguments: object) -> None:
        try:
            call(*arguments)  # type: ignore[operator]
        except ConnectionLost as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(ours.send, [b"x" * (64 << 20)])),
        threading.Thread(target=run, args=(ours.receive, 1)),
    ]
    for thread in threads:
        thread.start()
    ours.shutdown()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    ours.close()
    theirs.close()


def test_deadline_covers_a_peer_that_sends_byte_by_byte() -> None:
    ours, theirs = pair()
    ours.set_deadline(time.monotonic() + 0.05)
    theirs.send([b"x"])
    with pytest.raises(TimeoutError):
        ours.receive(2)
    with pytest.raises(TimeoutError):
        ours.receive(2)
    ours.set_deadline(None)
    theirs.send([b"yz"])
    assert ours.receive(2) == b"yz"
    ours.close()
    theirs.close()


def test_closing_ends_accept() -> None:
    acceptor = SocketAcceptor(socket.create_server(("127.0.0.1", 0)))
    ended = threading.Event()

    def accept() -> None:
        with pytest.raises(ConnectionLost):
            acceptor.accept()
        ended.set()

    thread = threading.Thread(target=accept)
    thread.start()
    acceptor.close()
    acceptor.close()
    thread.join()
    assert ended.is_set()
