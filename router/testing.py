"""Fake workers that speak the real protocol, for tests and benchmarks of the router alone.

No model runs: a script says what a worker does with each request. Each worker sits behind a proxy,
so that it can die as a killed process does, or hang as a stopped one does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.server import SERVICE, Addresses, RouterServer
from tandem.auth import ClusterAuth, ClusterToken
from tandem.config.tree import TandemConfig
from tandem.errorcodes import abort
from tandem.errors import ServingError
from tandem.membership import Membership
from tandem.pb import generate_pb2, generate_pb2_grpc, worker_pb2, worker_pb2_grpc
from tandem.rpc import server_options
from tandem.testing.calls import Outcome, generate, greedy
from tandem.testing.proxy import Proxy
from tandem.weights.store import ModelFolder
from tandem.workers import ModelIdentity, Role, WorkerIdentity, WorkerStatus, new_incarnation

SECRET = bytes(range(32))
LAYOUT = "layout-1"

_pids = itertools.count(1000)
_Context = grpc.aio.ServicerContext[Any, Any]


class FakeWorker:
    """What both roles share: a gRPC server behind a proxy, a seat in the registry, a record."""

    role: Role

    def __init__(self, worker_id: str, folder: ModelFolder, pages_total: int = 64) -> None:
        self.identity = WorkerIdentity(
            role=self.role,
            worker_id=worker_id,
            incarnation=new_incarnation(),
            pid=next(_pids),
            address="",
            model=ModelIdentity(
                name=folder.name,
                architecture=folder.spec.architecture,
                weights_digest=folder.weights_digest,
                dtype="float32",
                vocab_size=folder.spec.vocab_size,
                max_context_tokens=folder.spec.max_context_tokens,
            ),
            pages_total=pages_total,
            page_tokens=16,
            layout_digest=LAYOUT,
        )
        self.status = WorkerStatus()
        self.calls_proxy = Proxy()
        self.reports_proxy = Proxy()
        self.started: list[worker_pb2.WorkRequest] = []
        """Requests in order of arrival."""
        self.cancelled: list[str] = []
        """Ids of requests whose call was cancelled before it was over."""
        self.deadlines: list[float | None] = []
        """Seconds left of each request when it arrived."""
        self.changed = asyncio.Condition()
        """Notified when one of the lists above grew."""
        self._server: grpc.aio.Server | None = None
        self._membership: asyncio.Task[None] | None = None

    async def start(
        self, registry_address: str, tasks: asyncio.TaskGroup, *, proxied: bool = True
    ) -> None:
        """Serve and join; without proxies `die` and `freeze` do not work, but all is faster."""
        token, limits = ClusterToken(SECRET), TandemConfig().limits
        self._server = grpc.aio.server(
            interceptors=(ClusterAuth(token),), options=server_options(limits)
        )
        self._add_to(self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        address = f"127.0.0.1:{port}"
        if proxied:
            self.calls_proxy.start(address, tasks)
            self.reports_proxy.start(registry_address, tasks)
            address, registry_address = self.calls_proxy.address, self.reports_proxy.address
        self.identity = dataclasses.replace(self.identity, address=address)
        self.membership = Membership(
            registry_address, self.identity, lambda: self.status, token, limits
        )
        self._membership = tasks.create_task(
            self.membership.run(), name=f"{self.identity.worker_id}/membership"
        )

    async def die(self) -> None:
        """End as a killed process does: its connections are reset."""
        if self._server is None:
            return
        assert self._membership is not None
        self.calls_proxy.cut()
        self.reports_proxy.cut()
        self._membership.cancel()
        await self._server.stop(None)
        self._server = None  # its finaliser needs the event loop

    def freeze(self) -> None:
        """Hang as a stopped process does: connections stay, and nothing comes."""
        self.calls_proxy.stall()
        self.reports_proxy.stall()

    def thaw(self) -> None:
        """Go on after `freeze`."""
        self.calls_proxy.resume()
        self.reports_proxy.resume()

    async def leave(self) -> None:
        """Close the stream to the registry in good order."""
        assert self._membership is not None
        self._membership.cancel()
        await asyncio.wait([self._membership])

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds for the lists of this worker."""
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(condition)

    def _add_to(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    @asynccontextmanager
    async def _recorded(
        self, request: worker_pb2.WorkRequest, context: _Context
    ) -> AsyncIterator[None]:
        self.started.append(request)
        self.deadlines.append(context.time_remaining())
        await self._notify()
        try:
            yield
        except ServingError as error:
            await abort(context, error)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            await self._notify()
            raise

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class FakeDecode(FakeWorker, worker_pb2_grpc.DecodeWorkerServicer):
    """Reserves, waits for prefill's word, and streams what its script says."""

    role: Role = "decode"

    def __init__(self, worker_id: str, folder: ModelFolder, pages_total: int = 64) -> None:
        super().__init__(worker_id, folder, pages_total)
        self.script: DecodeScript = answer([65, 66, 67])

    async def Decode(  # type: ignore[override]  # noqa: N802 - writes instead of yielding
        self, request: worker_pb2.DecodeRequest, context: _Context
    ) -> None:
        """Run the script."""
        async with self._recorded(request.request, context):
            await self.script(Session(request.request, context))

    async def GetStatus(  # noqa: N802
        self, request: worker_pb2.WorkerStatusRequest, context: _Context
    ) -> generate_pb2.WorkerState:
        """The status that was set."""
        return self.status.to_wire(self.identity)

    def _add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self, server)


class FakePrefill(FakeWorker, worker_pb2_grpc.PrefillWorkerServicer):
    """Hands over at once unless its script says otherwise."""

    role: Role = "prefill"

    def __init__(self, worker_id: str, folder: ModelFolder, pages_total: int = 64) -> None:
        super().__init__(worker_id, folder, pages_total)
        self.script: PrefillScript = hand_over

    async def Prefill(  # noqa: N802
        self, request: worker_pb2.PrefillRequest, context: _Context
    ) -> worker_pb2.PrefillReply:
        """Run the script."""
        async with self._recorded(request.request, context):
            await self.script(request)
        return worker_pb2.PrefillReply(
            cached_tokens=1, queue_ms=2.0, compute_ms=3.0, transfer_ms=4.0
        )

    async def GetStatus(  # noqa: N802
        self, request: worker_pb2.WorkerStatusRequest, context: _Context
    ) -> generate_pb2.WorkerState:
        """The status that was set."""
        return self.status.to_wire(self.identity)

    def _add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self, server)


_arrivals: dict[bytes, asyncio.Event] = {}
"""For each target that decode has handed out and waits for: set by prefill."""


class Session:
    """One request on a fake decode worker, as its script sees it."""

    def __init__(self, request: worker_pb2.WorkRequest, context: _Context) -> None:
        self.request = request
        self._context = context
        self._target = request.room.to_bytes(8, "big")

    async def reserve(self) -> None:
        """Tell the router that prefill may be called."""
        _arrivals[self._target] = asyncio.Event()
        reserved = worker_pb2.Reserved(target=self._target)
        await self._context.write(worker_pb2.DecodeEvent(reserved=reserved))

    async def arrival(self) -> None:
        """Wait until prefill has handed over."""
        try:
            await _arrivals[self._target].wait()
        finally:
            del _arrivals[self._target]

    async def send(self, index: int, token_ids: Sequence[int], finish: int = 0) -> None:
        """Send a chunk; its text is the tokens as characters."""
        chunk = generate_pb2.Chunk(
            index=index, token_ids=token_ids, text="".join(map(chr, token_ids))
        )
        reason = generate_pb2.FinishReason.Name(finish)
        await self._context.write(
            worker_pb2.DecodeEvent(chunk=worker_pb2.DecodeChunk(chunk=chunk, finish_reason=reason))
        )


DecodeScript = Callable[[Session], Awaitable[None]]
PrefillScript = Callable[[worker_pb2.PrefillRequest], Awaitable[None]]


def answer(token_ids: Sequence[int]) -> DecodeScript:
    """A script that streams ``token_ids``, one in each chunk."""

    async def script(session: Session) -> None:
        await session.reserve()
        await session.arrival()
        for index, token_id in enumerate(token_ids):
            last = index == len(token_ids) - 1
            await session.send(index, [token_id], generate_pb2.FINISH_REASON_STOP if last else 0)

    return script


async def hand_over(request: worker_pb2.PrefillRequest) -> None:
    """A prefill script: the K and V have arrived."""
    _arrivals[request.target].set()


async def forever(_request: object) -> None:
    """A script of either role: nothing ever happens."""
    await asyncio.Event().wait()


_WorkerT = TypeVar("_WorkerT", bound=FakeWorker)


class Cluster:
    """A router and its fake workers."""

    def __init__(
        self, addresses: Addresses, channel: grpc.aio.Channel, tasks: asyncio.TaskGroup
    ) -> None:
        self.addresses = addresses
        self.channel = channel
        self.stub: generate_pb2_grpc.TandemAsyncStub = generate_pb2_grpc.TandemStub(channel)
        self.stopping = asyncio.Event()
        self.prefill: list[FakePrefill] = []
        self.decode: list[FakeDecode] = []
        self._tasks = tasks

    async def add(self, worker: _WorkerT) -> _WorkerT:
        """Start a worker and wait until the router knows it."""
        await worker.start(self.addresses.registry, self._tasks)
        if isinstance(worker, FakePrefill):
            self.prefill.append(worker)
        elif isinstance(worker, FakeDecode):
            self.decode.append(worker)
        incarnation = worker.identity.incarnation
        async with asyncio.timeout(20):
            while all(w.incarnation != incarnation for w in (await self.status()).workers):
                pass
        return worker

    async def ask(self, prompt: str = "hello", max_tokens: int = 3) -> Outcome:
        """What one greedy request brings."""
        return await generate(self.stub, greedy(prompt, max_tokens=max_tokens), deadline_s=30)

    async def health(self, service: str = SERVICE) -> AsyncIterator[int]:
        """The router's health, whenever it changes."""
        request = health_pb2.HealthCheckRequest(service=service)
        stub = health_pb2_grpc.HealthStub(self.channel)
        async for response in stub.Watch(request, timeout=20):
            yield response.status

    async def status(self) -> generate_pb2.GetStatusResponse:
        """What `GetStatus` says."""
        return await self.stub.GetStatus(generate_pb2.GetStatusRequest(), timeout=20)


@asynccontextmanager
async def cluster(
    config: TandemConfig, folder: ModelFolder, *, num_prefill: int = 1, num_decode: int = 1
) -> AsyncIterator[Cluster]:
    """A router with fake workers on loopback, all in this event loop."""
    ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
    stopping = asyncio.Event()
    server = RouterServer(config, folder, SECRET)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.run(stopping, ready.set_result), name="router")
        addresses = await ready
        async with grpc.aio.insecure_channel(addresses.public) as channel:
            running = Cluster(addresses, channel, tasks)
            running.stopping = stopping
            try:
                for number in range(num_prefill):
                    await running.add(FakePrefill(f"prefill-{number}", folder))
                for number in range(num_decode):
                    await running.add(FakeDecode(f"decode-{number}", folder))
                yield running
            finally:
                stopping.set()
                for worker in (*running.prefill, *running.decode):
                    await worker.die()
