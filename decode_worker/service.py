"""gRPC's view of a decode worker."""

from __future__ import annotations

import logging
from contextlib import aclosing
from typing import Any

import grpc.aio

from decode_worker.engine import DecodeEngine, Reserved
from tandem.errorcodes import abort
from tandem.errors import ServingError
from tandem.pb import generate_pb2, worker_pb2, worker_pb2_grpc
from tandem.requests import OutputChunk
from tandem.serving import Calls
from tandem.wireforms import chunk_event, request_from_wire
from tandem.workerserver import GetState

logger = logging.getLogger(__name__)


class DecodeService(worker_pb2_grpc.DecodeWorkerServicer):
    """Each call is one request's life; cancelling it frees everything."""

    def __init__(self, engine: DecodeEngine, calls: Calls, state: GetState) -> None:
        self._engine = engine
        self._calls = calls
        self._state = state

    # Writes instead of yielding: a generator that gRPC iterates is not told of a cancel that comes
    # while a message is being sent, and would free its pages only when it is collected.
    async def Decode(  # type: ignore[override]  # noqa: N802 - gRPC's spelling
        self,
        request: worker_pb2.DecodeRequest,
        context: grpc.aio.ServicerContext[Any, worker_pb2.DecodeEvent],
    ) -> None:
        """Reserve pages, take in the prompt's K and V, stream the output."""
        request_id = request.request.request_id
        try:
            with self._calls.serve():
                work = request_from_wire(request.request)
                async with aclosing(self._engine.decode(work)) as events:
                    async for event in events:
                        await context.write(_to_wire(event))
        except ServingError as error:
            await abort(context, error)
        except grpc.aio.InternalError:  # a write to a caller that is gone
            logger.debug("request_id=%s the caller left", request_id)

    async def GetStatus(  # noqa: N802 - gRPC's spelling
        self,
        request: worker_pb2.WorkerStatusRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> generate_pb2.WorkerState:
        """Counts as of now."""
        return self._state()


def _to_wire(event: Reserved | OutputChunk) -> worker_pb2.DecodeEvent:
    if isinstance(event, Reserved):
        return worker_pb2.DecodeEvent(
            reserved=worker_pb2.Reserved(target=event.target, cached_pages=event.cached_pages)
        )
    return chunk_event(event)
