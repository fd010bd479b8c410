"""What only sockets can show: garbage on ports, half frames, choosing a transport, restarts."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_transfer.messages import KVTarget, decode, encode
from kv_transfer.pieces import spans_of
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.testing import (
    GROUPS,
    NUM_PAGES,
    SECRET,
    MakePair,
    all_are,
    fill,
    handover,
    layout_of,
    make_pair,
    set_pages,
)
from kv_transfer.transport import ConnectionLost, RegisteredMemory
from kv_transfer.transports.shm import ShmTransport, shared_memory_problem
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.wire import MAX_HANDSHAKE_BODY_BYTES, FrameType, Header, encode_frame
from tandem.cache.pool import KVPool, PageBuffer
from tandem.config.tree import TransferConfig, TransportName
from tandem.errors import ConfigError, PeerLost, TransferAborted

HANG_GUARD_S = 30.0
needs_shm = pytest.mark.skipif(
    bool(shared_memory_problem(())), reason="no shared memory on this system"
)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(HANG_GUARD_S):
            await scenario

    asyncio.run(guarded())


def dial(endpoint: str) -> socket.socket:
    scheme, _, rest = endpoint.partition("://")
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=HANG_GUARD_S)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(HANG_GUARD_S)
    sock.connect("\0" + rest.rpartition("/")[2])
    return sock


def hears_only_the_end(sock: socket.socket) -> bool:
    """Whether the peer hangs up, after a challenge at most."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_garbage_ends_its_own_connection_only(socket_pair: MakePair, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    garbage = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"." * 100,
        os.urandom(4096),
        b"\0" * 4096,
        pickle.dumps(Canary(canary)) + b"." * 100,
        encode_frame(Header(type=FrameType.DATA, payload_bytes=1 << 30)),
        encode_frame(Header(type=FrameType.HELLO), b"x" * (MAX_HANDSHAKE_BODY_BYTES + 1)),
        encode_frame(Header(type=FrameType.HELLO), pickle.dumps(Canary(canary))),
        encode_frame(Header(type=FrameType.OPEN, room=5, epoch=1), b"\x80"),
        encode_frame(Header(type=FrameType.ABORT, room=5, epoch=1), b"\x81\xa6reason\xa1x"),
        encode_frame(Header(type=FrameType.HELLO))[:20],
    ]

    async def scenario() -> None:
        async with socket_pair() as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            stream = await pair.sender.open(reservation.target, "a")
            stream.send_layer(0, [10, 11], 0)
            for data in garbage:
                with dial(pair.receiver.endpoints[0]) as sock:
                    with suppress(OSError):  # it may hang up before it has read everything
                        sock.sendall(data)
                        sock.shutdown(socket.SHUT_WR)
                    assert await asyncio.to_thread(hears_only_the_end, sock)
            stream.send_layer(1, [10, 11], 0)
            stream.send_layer(2, [10, 11], 0)
            stream.finish(handover(8))
            await reservation.wait()
            await stream.wait()
            assert pair.same([10, 11], [3, 4])
            assert not canary.exists()

    run(scenario())


def test_bad_frames_of_an_authentic_peer_end_its_connection(socket_pair: MakePair) -> None:
    bad: list[dict[str, Any]] = [
        {"layer": 3},
        {"group": 2},
        {"num_pages": 0},
        {"num_pages": 3},
        {"num_pages": 100_000},
        {"checksum": None},
        {"type": FrameType.WELCOME, "payload_bytes": 0},
    ]

    async def scenario() -> None:
        async with socket_pair() as pair:
            other = pair.receiver.reserve("b", 6, [5, 6], 8)
            stream = await pair.sender.open(other.target, "b")
            for room, change in enumerate(bad, start=10):
                reservation = pair.receiver.reserve("a", room, [3, 4], 8)
                raw = await asyncio.to_thread(pair.raw_peer, reservation.target)
                raw.open()
                raw.data(0, 0, [10, 11], change=partial(replace, **change))
                with pytest.raises(PeerLost, match="bad frame"):
                    await reservation.wait()
                raw.close()
                await reservation.release()
            pair.send(stream, [1, 2])
            stream.finish(handover(8))
            await other.wait()
            await stream.wait()
            assert pair.same([1, 2], [5, 6])

    run(scenario())


def test_frames_beyond_the_credit_end_the_connection() -> None:
    async def scenario() -> None:
        async with make_pair("tcp", credit_bytes=1024) as pair:
            reservation = pair.receiver.reserve("a", 5, list(range(1, 6)), 20)
            raw = await asyncio.to_thread(pair.raw_peer, reservation.target)
            assert raw.peer.credit_bytes == 1024
            raw.open()
            raw.data(0, 0, [10, 11, 12, 13, 14])
            with pytest.raises(PeerLost, match="beyond the credit"):
                await reservation.wait()
            raw.close()

    run(scenario())


def test_release_does_not_wait_for_a_peer_stuck_inside_a_frame() -> None:
    """Half of a frame came; its pages are free at once, and the other half goes nowhere."""

    async def scenario() -> None:
        async with make_pair("tcp") as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            raw = await asyncio.to_thread(pair.raw_peer, reservation.target)
            raw.open()
            payload = bytes(range(256)) * 2
            header = Header(
                type=FrameType.DATA,
                room=raw.room,
                epoch=raw.epoch,
                num_pages=2,
                payload_bytes=len(payload),
                checksum=0,
            )
            stream = raw.connection._stream  # type: ignore[attr-defined]
            stream.send([encode_frame(header), payload[:300]])
            await reservation.release()
            set_pages(pair.target, [3, 4], 0xB0)
            stream.send([payload[300:]])
            await asyncio.to_thread(raw.read_until, FrameType.CREDIT)
            assert all_are(pair.target, [3, 4], 0xB0)
            raw.close()

    run(scenario())


def test_many_scattered_pages_in_one_frame() -> None:
    """More spans than one system call takes."""
    groups = tuple(replace(group, num_layers=1) for group in GROUPS["mha"])

    async def scenario() -> None:
        num_pages = 2400
        config = replace(TransferConfig(), transport="tcp")
        source, target = KVPool(groups, num_pages), KVPool(groups, num_pages)
        fill(source, 3)
        receiver = KVReceiver(target, layout_of(groups), config, SECRET, "d")
        sender = KVSender(source, layout_of(groups), config, SECRET, "p")
        await receiver.start()
        odd = list(range(1, num_pages, 2))
        reservation = receiver.reserve("a", 1, odd, 4 * len(odd))
        stream = await sender.open(reservation.target, "a")
        stream.send_layer(0, odd[::-1], 0)
        stream.finish(handover(4 * len(odd)))
        await reservation.wait()
        stats = await stream.wait()
        assert stats.frames == 4
        for name in ("k", "v"):
            sent = source[name].view(torch.int32)[:, odd[::-1]]
            assert sent.equal(target[name].view(torch.int32)[:, odd])
        await sender.close()
        await receiver.close()

    run(scenario())


def test_neighbours_become_one_span() -> None:
    group = GROUPS["mha"][0]
    spans = spans_of(group, 0, 1, [5, 6, 7, 2, 3, 3, 9], 10)
    size = group.page_bytes
    assert [(span.offset // size, span.nbytes // size) for span in spans] == [
        (15, 3),
        (12, 2),
        (13, 1),
        (19, 1),
    ]


@needs_shm
@pytest.mark.parametrize(
    ("sender_uses", "receiver_uses", "chosen"),
    [
        ("auto", "auto", "shm"),
        ("tcp", "auto", "tcp"),
        ("shm", "auto", "shm"),
        ("auto", "tcp", "tcp"),
        ("auto", "shm", "shm"),
    ],
)
def test_transport_is_chosen_per_pair(
    sender_uses: TransportName, receiver_uses: TransportName, chosen: str
) -> None:
    assert transport_between(sender_uses, receiver_uses) == chosen


@needs_shm
def test_no_common_transport_is_an_error() -> None:
    with pytest.raises(PeerLost, match="no way to decode worker"):
        transport_between("shm", "tcp")


@needs_shm
def test_another_host_or_an_unreachable_socket_means_tcp() -> None:
    def elsewhere(target: KVTarget) -> KVTarget:
        shm = target.endpoints[0].split("/")
        return replace(
            target, endpoints=("/".join([*shm[:2], "other", shm[3]]), *target.endpoints[1:])
        )

    def not_reachable(target: KVTarget) -> KVTarget:
        return replace(target, endpoints=(target.endpoints[0] + "x", *target.endpoints[1:]))

    assert transport_between("auto", "auto", elsewhere) == "tcp"
    assert transport_between("auto", "auto", not_reachable) == "tcp"


def transport_between(
    sender_uses: TransportName, receiver_uses: TransportName, change: Any = lambda target: target
) -> str:
    groups = GROUPS["mha"]
    used: list[str] = []

    async def scenario() -> None:
        source, target = KVPool(groups, NUM_PAGES), KVPool(groups, NUM_PAGES)
        layout = layout_of(groups)
        receiver = KVReceiver(target, layout, TransferConfig(transport=receiver_uses), SECRET, "d")
        sender = KVSender(source, layout, TransferConfig(transport=sender_uses), SECRET, "p")
        await receiver.start()
        try:
            reservation = receiver.reserve("a", 1, [1], 4)
            where = encode(change(decode(KVTarget, reservation.target)))
            stream = await sender.open(where, "a")
            for layer in range(3):
                stream.send_layer(layer, [2], 0)
            stream.finish(handover(4))
            await reservation.wait()
            used.append((await stream.wait()).transport)
        finally:
            await sender.close()
            await receiver.close()

    run(scenario())
    return used[0]


def test_shm_without_shared_memory_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    groups = GROUPS["mha"]
    pool = KVPool(groups, NUM_PAGES)
    config = TransferConfig(transport="shm")
    with pytest.raises(ConfigError, match="use tcp"):
        KVSender(pool, layout_of(groups), config, SECRET, "p")
    with pytest.raises(ConfigError, match="use tcp"):
        KVReceiver(pool, layout_of(groups), config, SECRET, "d")


@needs_shm
def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with make_pair("shm") as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)
            with monkeypatch.context() as patch:
                patch.setattr(os, "geteuid", lambda: 12345)
                with pytest.raises(PeerLost, match="not as 12345"):
                    await pair.sender.open(reservation.target, "a")
            await pair.transfer(6, [1], [5])

    run(scenario())


@needs_shm
def test_memory_that_could_shrink_under_its_reader_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def register_unsealed(self: ShmTransport, buffers: Sequence[PageBuffer]) -> None:
        self._memory = RegisteredMemory(buffers)

    monkeypatch.setattr(ShmTransport, "register", register_unsealed)

    async def scenario() -> None:
        async with make_pair("shm") as pair:
            reservation = pair.receiver.reserve("a", 5, [3, 4], 8)

            async def attempt() -> None:
                stream = await pair.sender.open(reservation.target, "a")
                await stream.wait()

            with pytest.raises(PeerLost):
                await attempt()
            await pair.receiver.close()
            assert pair.receiver.counters.refused_connections > 0

    run(scenario())


def test_listening_everywhere_tells_peers_an_address_they_can_use() -> None:
    listener = TcpTransport("0.0.0.0", 30.0).listen()
    with dial(listener.endpoint) as sock:
        accepted = listener.accept()
        assert listener.endpoint.startswith(f"tcp://{sock.getpeername()[0]}:")
        accepted.close()
    listener.close()
    with pytest.raises(ConnectionLost):
        listener.accept()


def test_address_that_cannot_be_bound_is_a_config_error() -> None:
    async def scenario() -> None:
        groups = GROUPS["mha"]
        config = TransferConfig(transport="tcp", host="192.0.2.77")
        pool = KVPool(groups, NUM_PAGES)
        receiver = KVReceiver(pool, layout_of(groups), config, SECRET, "d")
        with pytest.raises(ConfigError, match=r"192\.0\.2\.77"):
            await receiver.start()

    run(scenario())


def test_restarted_peer_at_the_same_port_is_a_new_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with make_pair("tcp") as pair:
            await pair.transfer(1, [1], [3])
            old = pair.receiver.reserve("a", 2, [3], 4)
            (endpoint,) = pair.receiver.endpoints
            await pair.receiver.close()
            create = socket.create_server
            port = int(endpoint.rpartition(":")[2])
            monkeypatch.setattr(
                socket,
                "create_server",
                lambda address, **options: create((address[0], port), **options),
            )
            (transport,) = pair.transports()
            pair.receiver = KVReceiver(
                pair.target, pair.layout, pair.config, SECRET, "decode-2", pair.clock, [transport]
            )
            await pair.receiver.start()
            assert pair.receiver.endpoints == (endpoint,)
            with pytest.raises(PeerLost, match="decode-1 is gone"):
                await pair.sender.open(old.target, "a")
            await pair.transfer(3, [1], [4])
            await pair.receiver.close()

    run(scenario())


def test_many_aborts_leave_nothing_behind(socket_pair: MakePair) -> None:
    async def scenario() -> None:
        async with socket_pair(credit_bytes=4096) as pair:
            threads_and_files = len(os.listdir("/proc/self/fd"))
            for room in range(1, 60):
                reservation = pair.receiver.reserve("a", room, list(range(1, 21)), 80)
                stream = await pair.sender.open(reservation.target, "a")
                for layer in range(room % 4):
                    stream.send_layer(layer, list(range(1, 21)), 0)
                if room % 2:
                    await reservation.release()
                    with pytest.raises(TransferAborted):
                        await stream.wait()
                else:
                    stream.abort("test")
                    with pytest.raises(TransferAborted):
                        await stream.wait()
                    with pytest.raises(TransferAborted):
                        await reservation.wait()
                    await reservation.release()
            await pair.transfer(99, [1], [3])
            (link,) = pair.sender.links
            assert link.free_credit_bytes == link.credit_bytes
            assert pair.sender.pending == pair.receiver.pending == 0
            assert len(os.listdir("/proc/self/fd")) <= threads_and_files + 6

    run(scenario())
