"""One prefill and one decode worker called as a router calls them, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from tandem.auth import ClusterToken
from tandem.config.tree import LimitsConfig
from tandem.errorcodes import error_from_rpc
from tandem.pb import generate_pb2, worker_pb2, worker_pb2_grpc
from tandem.requests import GenerateRequest, OutputChunk
from tandem.rpc import channel_options
from tandem.wireforms import chunk_from_wire, request_to_wire

_POLL_S = 0.002


@dataclass(kw_only=True, slots=True)
class Completion:
    """What one request brought."""

    chunks: list[OutputChunk] = field(default_factory=list)
    cached_tokens: int = 0
    cached_pages: int = 0
    """Leading pages that decode had already."""
    transferred_bytes: int = 0

    @property
    def token_ids(self) -> list[int]:
        """All output tokens; chunks are checked to be contiguous and to end once."""
        count = 0
        for chunk in self.chunks:
            assert chunk.index == count, f"chunk {chunk.index} follows {count} tokens"
            count += len(chunk.token_ids)
        ended = [chunk.finish_reason is not None for chunk in self.chunks]
        assert ended == [False] * (len(ended) - 1) + [True], "not exactly one end, at the end"
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(chunk.text for chunk in self.chunks)


class Pair:
    """Stubs of two workers."""

    def __init__(self, prefill: grpc.aio.Channel, decode: grpc.aio.Channel, secret: bytes) -> None:
        self.prefill: worker_pb2_grpc.PrefillWorkerAsyncStub = worker_pb2_grpc.PrefillWorkerStub(
            prefill
        )
        self.decode: worker_pb2_grpc.DecodeWorkerAsyncStub = worker_pb2_grpc.DecodeWorkerStub(
            decode
        )
        self.metadata = ClusterToken(secret).metadata

    async def generate(
        self,
        request: GenerateRequest,
        on_chunk: Callable[[OutputChunk], None] = lambda _chunk: None,
    ) -> Completion:
        """Reserve, prefill and decode; cancelling it cancels both calls.

        Raises:
            ServingError: what the failing worker raised.
        """
        done = Completion()
        target: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        wire = request_to_wire(request)
        try:
            async with asyncio.TaskGroup() as legs:
                legs.create_task(self._decode(wire, target, done, on_chunk))
                legs.create_task(self._prefill(wire, target, done))
        except* grpc.aio.AioRpcError as failures:
            first = failures.exceptions[0]
            assert isinstance(first, grpc.aio.AioRpcError)
            raise error_from_rpc(first) from None
        return done

    async def _decode(
        self,
        wire: worker_pb2.WorkRequest,
        target: asyncio.Future[bytes],
        done: Completion,
        on_chunk: Callable[[OutputChunk], None],
    ) -> None:
        call = self.decode.Decode(worker_pb2.DecodeRequest(request=wire), metadata=self.metadata)
        async for event in call:
            if event.HasField("reserved"):
                done.cached_pages = event.reserved.cached_pages
                target.set_result(event.reserved.target)
            else:
                done.chunks.append(chunk_from_wire(event.chunk))
                on_chunk(done.chunks[-1])

    async def _prefill(
        self, wire: worker_pb2.WorkRequest, target: asyncio.Future[bytes], done: Completion
    ) -> None:
        reply = await self.prefill.Prefill(
            worker_pb2.PrefillRequest(request=wire, target=await target), metadata=self.metadata
        )
        done.cached_tokens = reply.cached_tokens
        done.transferred_bytes = reply.transferred_bytes

    async def states(self) -> tuple[generate_pb2.WorkerState, generate_pb2.WorkerState]:
        """Prefill's and decode's status."""
        return await self._state_of(self.prefill), await self._state_of(self.decode)

    async def _state_of(
        self,
        worker: worker_pb2_grpc.PrefillWorkerAsyncStub | worker_pb2_grpc.DecodeWorkerAsyncStub,
    ) -> generate_pb2.WorkerState:
        return await worker.GetStatus(worker_pb2.WorkerStatusRequest(), metadata=self.metadata)

    async def decode_drains(self) -> None:
        """Return when the decode worker says that it is draining; prefill may be gone."""
        while (await self._state_of(self.decode)).state != "draining":  # noqa: ASYNC110 - as below
            await asyncio.sleep(_POLL_S)

    async def until(
        self, holds: Callable[[generate_pb2.WorkerState, generate_pb2.WorkerState], bool]
    ) -> None:
        """Return when the two states are as wanted; the caller bounds the wait."""
        while not holds(*await self.states()):  # noqa: ASYNC110 - a status has no event
            await asyncio.sleep(_POLL_S)

    async def idle(self) -> None:
        """Return when no worker holds anything for a request."""
        await self.until(lambda prefill, decode: is_idle(prefill) and is_idle(decode))


def is_idle(state: generate_pb2.WorkerState) -> bool:
    """Whether a worker holds nothing for any request."""
    return not (
        state.pages_used
        or state.pages_swapped
        or state.running
        or state.queued
        or state.transfers_pending
    )


@asynccontextmanager
async def connect(prefill: str, decode: str, secret: bytes) -> AsyncIterator[Pair]:
    """Stubs of the workers at two addresses."""
    options = channel_options(LimitsConfig())
    async with (
        grpc.aio.insecure_channel(prefill, options=options) as prefill_channel,
        grpc.aio.insecure_channel(decode, options=options) as decode_channel,
    ):
        yield Pair(prefill_channel, decode_channel, secret)
