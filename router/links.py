"""The router's connection to one worker process."""

from __future__ import annotations

import asyncio

import grpc.aio

from tandem.auth import ClusterToken
from tandem.config.tree import LimitsConfig
from tandem.errorcodes import error_from_rpc
from tandem.errors import WorkerLost
from tandem.pb import generate_pb2, worker_pb2, worker_pb2_grpc
from tandem.requests import GenerateRequest
from tandem.rpc import channel_options
from tandem.wireforms import request_to_wire
from tandem.workers import WorkerIdentity, WorkerStatus


class DecodeStream:
    """What a decode worker sends for one request."""

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[worker_pb2.DecodeRequest, worker_pb2.DecodeEvent],
        worker_id: str,
        request_id: str,
    ) -> None:
        self._call = call
        self._worker_id = worker_id
        self._request_id = request_id

    async def next(self) -> worker_pb2.DecodeEvent | None:
        """The next event, or None when the worker ended its stream.

        Raises:
            ServingError: what the worker raised, or `WorkerLost`.
        """
        try:
            event = await self._call.read()
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(
                failure, worker_id=self._worker_id, request_id=self._request_id
            ) from None
        except asyncio.CancelledError:
            _raise_if_closed(self._worker_id)
            raise
        return event if isinstance(event, worker_pb2.DecodeEvent) else None

    def cancel(self) -> None:
        """Make the worker stop and free; nothing happens when its stream is over."""
        self._call.cancel()


class WorkerLink:
    """Calls to one incarnation of a worker; every failure is an error of the tree."""

    def __init__(self, worker: WorkerIdentity, token: ClusterToken, limits: LimitsConfig) -> None:
        """Start to connect; calls may be made at once."""
        self._worker = worker
        self._metadata = token.metadata
        self._channel = grpc.aio.insecure_channel(worker.address, options=channel_options(limits))
        self._prefill: worker_pb2_grpc.PrefillWorkerAsyncStub
        self._prefill = worker_pb2_grpc.PrefillWorkerStub(self._channel)
        self._decode: worker_pb2_grpc.DecodeWorkerAsyncStub
        self._decode = worker_pb2_grpc.DecodeWorkerStub(self._channel)
        self._channel.get_state(try_to_connect=True)

    async def prefill(
        self, request: GenerateRequest, target: bytes, timeout_s: float | None
    ) -> worker_pb2.PrefillReply:
        """Compute the prompt and stream its K and V to ``target``; cancelling stops both.

        Raises:
            ServingError: what the worker raised, or `WorkerLost`.
        """
        message = worker_pb2.PrefillRequest(request=request_to_wire(request), target=target)
        try:
            return await self._prefill.Prefill(message, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(
                failure, worker_id=self._worker.worker_id, request_id=request.request_id
            ) from None
        except asyncio.CancelledError:
            _raise_if_closed(self._worker.worker_id)
            raise

    def decode(self, request: GenerateRequest, timeout_s: float | None) -> DecodeStream:
        """Open the stream that is the request's life on a decode worker."""
        message = worker_pb2.DecodeRequest(request=request_to_wire(request))
        call = self._decode.Decode(message, timeout=timeout_s, metadata=self._metadata)
        return DecodeStream(call, self._worker.worker_id, request.request_id)

    async def status(self, timeout_s: float) -> WorkerStatus:
        """How the worker is doing, from itself.

        Raises:
            ServingError: it does not answer.
        """
        stub = self._prefill if self._worker.role == "prefill" else self._decode
        try:
            state: generate_pb2.WorkerState = await stub.GetStatus(
                worker_pb2.WorkerStatusRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure, worker_id=self._worker.worker_id) from None
        except asyncio.CancelledError:
            _raise_if_closed(self._worker.worker_id)
            raise
        return WorkerStatus.from_wire(state)

    async def close(self) -> None:
        """Cancel what is under way and disconnect."""
        await self._channel.close()


def _raise_if_closed(worker_id: str) -> None:
    """Tell a call that ended with its connection from a task that was cancelled.

    gRPC raises `CancelledError` in whoever awaits a call when its channel is closed.
    """
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise WorkerLost(worker_id, "the connection to it was closed") from None
