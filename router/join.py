"""The gRPC service by which workers join the router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from router.registry import Registry
from tandem.errorcodes import abort
from tandem.errors import WorkerError
from tandem.pb import worker_pb2, worker_pb2_grpc
from tandem.workers import WorkerIdentity, WorkerStatus


class RegistryService(worker_pb2_grpc.RegistryServicer):
    """One call per worker, as long as the worker lives."""

    def __init__(self, registry: Registry, heartbeat_interval_s: float) -> None:
        self._registry = registry
        self._reply = worker_pb2.JoinReply(heartbeat_interval_s=heartbeat_interval_s)

    async def Join(  # type: ignore[override]  # noqa: N802 - a coroutine that writes, named by the proto
        self,
        request_iterator: AsyncIterator[worker_pb2.WorkerReport],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Take a worker in, and its reports, until its stream is over."""
        seat = None
        try:
            async for report in request_iterator:
                status = WorkerStatus.from_wire(report.status)
                if seat is None:
                    seat = self._registry.join(WorkerIdentity.from_wire(report.info), status)
                    await context.write(self._reply)
                elif not self._registry.report(seat, status):
                    await context.abort(
                        grpc.StatusCode.ABORTED,
                        "this stream is no longer the worker's: it was silent for too long, or "
                        "another one took its place; join again",
                    )
        except WorkerError as error:
            await abort(context, error)
        finally:
            if seat is not None:
                self._registry.leave(seat)
