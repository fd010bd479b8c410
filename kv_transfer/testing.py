"""Both halves of a transfer in one process, and a scripted peer: what the tests are made of."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kv_transfer.handshake import Identity, greet
from kv_transfer.layout import KVLayout
from kv_transfer.messages import (
    Abort,
    Commit,
    KVTarget,
    Message,
    Open,
    decode,
    encode,
    encode_handover,
)
from kv_transfer.pieces import checksum, spans_of
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.stream import KVStream
from kv_transfer.transport import Connection, InFrame, OutFrame, RegisteredMemory, Transport
from kv_transfer.transports.inproc import Direction, InprocNetwork, InprocTransport
from kv_transfer.transports.shm import ShmTransport
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.tls import TlsContexts
from kv_transfer.wire import MAX_BODY_BYTES, FrameType, Header
from tandem.cache.groups import CacheGroup
from tandem.cache.pool import KVPool
from tandem.config.tree import TransferConfig
from tandem.requests import Handover, SampledToken

SECRET = b"s" * 32
NUM_PAGES = 24
HANG_GUARD_S = 30.0


def group(name: str, shape: tuple[int, ...], layers: int = 3) -> CacheGroup:
    """Make a small group with pages of four tokens."""
    return CacheGroup(
        name=name, num_layers=layers, page_tokens=4, token_shape=shape, dtype="float32"
    )


GROUPS = {
    "mha": (group("k", (2, 8)), group("v", (2, 8))),
    "mla": (group("ckv", (1, 24)), group("k_rope", (1, 8))),
}


def layout_of(groups: Sequence[CacheGroup]) -> KVLayout:
    """Make a layout of these groups."""
    return KVLayout(model="m", weights_digest="w", groups=tuple(groups), rope="r")


class Clock:
    """Time that moves only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def fill(pool: KVPool, seed: int) -> None:
    """Fill a pool with random bytes."""
    random = np.random.default_rng(seed)
    for buffer in pool.buffers:
        buffer.memory[:] = random.bytes(len(buffer.memory))


def page(pool: KVPool, index: int, layer: int, page_id: int) -> bytes:
    """Copy one page of one group and layer."""
    buffer = pool.buffers[index]
    start = buffer.group.page_offset_bytes(layer, page_id, buffer.num_pages)
    return bytes(buffer.memory[start : start + buffer.group.page_bytes])


def set_pages(pool: KVPool, page_ids: Sequence[int], value: int) -> None:
    """Set every byte of pages, in all groups and layers."""
    for buffer in pool.buffers:
        for layer in range(buffer.group.num_layers):
            for page_id in page_ids:
                start = buffer.group.page_offset_bytes(layer, page_id, buffer.num_pages)
                end = start + buffer.group.page_bytes
                buffer.memory[start:end] = bytes([value]) * (end - start)


def all_are(pool: KVPool, page_ids: Sequence[int], value: int) -> bool:
    """Whether every byte of pages has this value."""
    return all(
        set(page(pool, index, layer, page_id)) == {value}
        for index, buffer in enumerate(pool.buffers)
        for layer in range(buffer.group.num_layers)
        for page_id in page_ids
    )


def handover(prompt_tokens: int) -> Handover:
    """Make a handover for a prompt of this length."""
    return Handover(
        first_token=SampledToken(token_id=7), prompt_tokens=prompt_tokens, cached_tokens=0
    )


class FrameLog:
    """Frames that prefill wrote."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._written: Counter[FrameType] = Counter()

    def add(self, direction: Direction, header: Header) -> None:
        """Note a frame."""
        with self._changed:
            self._written[header.type] += direction == "to_decode"
            self._changed.notify_all()

    def count(self, kind: FrameType) -> int:
        """How many frames of a type were written."""
        with self._changed:
            return self._written[kind]

    def wait_for(self, kind: FrameType, times: int) -> None:
        """Block until enough frames of a type were written."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._written[kind] >= times, HANG_GUARD_S)


@dataclass
class Pair:
    """A prefill and a decode worker's halves."""

    sender: KVSender
    receiver: KVReceiver
    source: KVPool
    target: KVPool
    clock: Clock
    network: InprocNetwork
    transports: Callable[[], list[Transport]]
    config: TransferConfig
    layout: KVLayout = field(init=False)
    log: FrameLog = field(default_factory=FrameLog)

    def __post_init__(self) -> None:
        self.network.on_frame = self.log.add
        self.layout = layout_of(self.source.groups)

    def send(self, stream: KVStream, page_ids: Sequence[int], first_page: int = 0) -> None:
        """Send these pages in all layers."""
        for layer in range(self.source.groups[0].num_layers):
            stream.send_layer(layer, page_ids, first_page)

    async def transfer(
        self, room: int, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> Handover:
        """One whole transfer of full pages; raises what the sender's end raises."""
        num_tokens = 4 * len(target_ids)
        reservation = self.receiver.reserve(f"r{room}", room, target_ids, num_tokens)
        try:
            stream = await self.sender.open(reservation.target, f"r{room}")
            self.send(stream, source_ids)
            stream.finish(handover(num_tokens))
            await stream.wait()
            return await reservation.wait()
        finally:
            await reservation.release()

    def same(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> bool:
        """Whether these pages are equal on both sides."""
        return all(
            page(self.source, index, layer, ours) == page(self.target, index, layer, theirs)
            for index, buffer in enumerate(self.source.buffers)
            for layer in range(buffer.group.num_layers)
            for ours, theirs in zip(source_ids, target_ids, strict=True)
        )

    async def sender_says(self, kind: FrameType, times: int = 1) -> None:
        """Wait until prefill has written this many frames of a type; in-memory networks only."""
        await asyncio.to_thread(self.log.wait_for, kind, times)

    def raw_peer(self, target: bytes) -> RawPeer:
        """A prefill worker that says exactly what a test wants."""
        return RawPeer(self, decode(KVTarget, target))


class RawPeer:
    """An authenticated connection on which a test writes any frames; all methods block."""

    def __init__(self, pair: Pair, target: KVTarget) -> None:
        (transport,) = pair.transports()
        transport.register(pair.source.buffers)
        self.memory = RegisteredMemory(pair.source.buffers)
        self.room, self.epoch = target.room, target.epoch
        self.connection: Connection = transport.connect(target.endpoints[0], HANG_GUARD_S)
        self.connection.set_deadline(time.monotonic() + HANG_GUARD_S)
        identity = Identity(layout=pair.layout, secret=SECRET, incarnation="raw-prefill")
        self.peer = greet(self.connection, identity, target.incarnation)
        self.connection.share_sources()

    def say(self, kind: FrameType, message: Message | None = None) -> None:
        """Write a control frame."""
        header = Header(type=kind, room=self.room, epoch=self.epoch)
        body = b"" if message is None else encode(message)
        self.connection.write([OutFrame(header=header, body=body)])

    def open(self) -> None:
        """Claim the reservation."""
        self.say(FrameType.OPEN, Open(request_id="raw"))

    def abort(self) -> None:
        """Give it up."""
        self.say(FrameType.ABORT, Abort(reason="raw"))

    def commit(self, pages_by_layer: Sequence[int], prompt_tokens: int) -> None:
        """Write a commit with this manifest."""
        body = encode_handover(handover(prompt_tokens))
        self.say(FrameType.COMMIT, Commit(pages_by_layer=tuple(pages_by_layer), handover=body))

    def data(
        self,
        layer: int,
        index: int,
        page_ids: Sequence[int],
        first_page: int = 0,
        *,
        change: Callable[[Header], Header] = lambda header: header,
    ) -> None:
        """Write pages of one layer and group, with a header that ``change`` may spoil."""
        buffer = self.memory.buffers[index]
        spans = spans_of(buffer.group, index, layer, page_ids, buffer.num_pages)
        header = Header(
            type=FrameType.DATA,
            room=self.room,
            epoch=self.epoch,
            layer=layer,
            group=index,
            first_page=first_page,
            num_pages=len(page_ids),
            payload_bytes=len(page_ids) * buffer.group.page_bytes,
            checksum=checksum(self.memory, spans),
        )
        self.connection.write([OutFrame(header=change(header), spans=spans)])

    def everything(self, page_ids: Sequence[int]) -> None:
        """Write these pages of all layers and groups."""
        for layer in range(self.memory.buffers[0].group.num_layers):
            for index in range(len(self.memory.buffers)):
                self.data(layer, index, page_ids)

    def read(self) -> InFrame:
        """Wait for a frame."""
        return self.connection.read(MAX_BODY_BYTES)

    def read_until(self, kind: FrameType) -> InFrame:
        """Wait for a frame of this type and drop those before it."""
        while (frame := self.read()).header.type is not kind:
            pass
        return frame

    def close(self) -> None:
        """Hang up."""
        self.connection.shutdown()
        self.connection.close()


MakePair = Callable[..., AbstractAsyncContextManager[Pair]]


@asynccontextmanager
async def make_pair(
    transport: str,
    *,
    groups: str = "mha",
    sender_layout: KVLayout | None = None,
    receiver_layout: KVLayout | None = None,
    receiver_secret: bytes = SECRET,
    **settings: Any,
) -> AsyncIterator[Pair]:
    """Run both halves over one transport; ``settings`` are fields of `TransferConfig`."""
    clock, network = Clock(), InprocNetwork()
    network.pull = transport == "inproc-pull"
    config = replace(TransferConfig(), **settings)

    def transports() -> list[Transport]:
        match transport:
            case "tcp":
                return [TcpTransport("127.0.0.1", config.idle_timeout_s)]
            case "tls":
                tls = TlsContexts(config.tls)
                return [TcpTransport("127.0.0.1", config.idle_timeout_s, tls)]
            case "shm":
                return [ShmTransport()]
            case _:
                return [InprocTransport(network)]

    source, target = KVPool(GROUPS[groups], NUM_PAGES), KVPool(GROUPS[groups], NUM_PAGES)
    if sender_layout is not None:
        source = KVPool(sender_layout.groups, NUM_PAGES)
    if receiver_layout is not None:
        target = KVPool(receiver_layout.groups, NUM_PAGES)
    fill(source, 1)
    receiver = KVReceiver(
        target,
        receiver_layout or layout_of(target.groups),
        config,
        receiver_secret,
        "decode-1",
        clock,
        transports(),
    )
    sender = KVSender(
        source,
        layout_of(source.groups),
        config,
        SECRET,
        "prefill-1",
        clock=clock,
        transports=transports(),
    )
    await receiver.start()
    try:
        yield Pair(sender, receiver, source, target, clock, network, transports, config)
    finally:
        await sender.close()
        await receiver.close()
