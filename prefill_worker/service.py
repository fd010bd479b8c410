"""gRPC's view of a prefill worker."""

from __future__ import annotations

from typing import Any

import grpc.aio

from prefill_worker.engine import PrefillEngine
from tandem.errorcodes import abort
from tandem.errors import ServingError
from tandem.pb import generate_pb2, worker_pb2, worker_pb2_grpc
from tandem.serving import Calls
from tandem.wireforms import request_from_wire
from tandem.workerserver import GetState


class PrefillService(worker_pb2_grpc.PrefillWorkerServicer):
    """Each call is one request's life; cancelling it frees everything."""

    def __init__(self, engine: PrefillEngine, calls: Calls, state: GetState) -> None:
        self._engine = engine
        self._calls = calls
        self._state = state

    async def Prefill(  # noqa: N802 - gRPC's spelling
        self,
        request: worker_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> worker_pb2.PrefillReply:
        """Compute a prompt and send its K and V to the target."""
        try:
            with self._calls.serve():
                outcome = await self._engine.prefill(
                    request_from_wire(request.request), request.target
                )
        except ServingError as error:
            await abort(context, error)
        return worker_pb2.PrefillReply(
            cached_tokens=outcome.cached_tokens,
            queue_ms=outcome.queue_ms,
            compute_ms=outcome.compute_ms,
            transfer_ms=outcome.transfer_ms,
            transferred_bytes=outcome.transferred_bytes,
        )

    async def GetStatus(  # noqa: N802 - gRPC's spelling
        self,
        request: worker_pb2.WorkerStatusRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> generate_pb2.WorkerState:
        """Counts as of now."""
        return self._state()
