"""One attempt of a request: its two calls, on a prefill and on a decode worker.

The decode stream is opened first. Prefill is called when decode has reserved pages, while the
stream is read on. A failure of either leg ends the attempt and cancels the other. Once a token has
arrived, prefill's part is done and its failure means nothing; one that comes before waits a moment
for that token, which may be on its way. Transfer errors are often the echo of a death: the leg that
fails with one waits a moment for the other's error, so that the caller is told the cause.
"""

from __future__ import annotations

import asyncio
import logging

from router.delivery import Delivery
from router.links import DecodeStream
from router.registry import Placement
from router.scope import Scope, stoppable
from tandem.errors import ServingError, TransferError, WorkerError, WorkerLost
from tandem.pb import generate_pb2, worker_pb2
from tandem.requests import GenerateRequest

logger = logging.getLogger(__name__)

_ROOT_CAUSE_S = 0.25
_EPILOGUE_S = 2.0  # both calls end by themselves in moments once the last token is there


class Legs:
    """Runs one attempt and keeps what its end needs."""

    def __init__(
        self,
        request: GenerateRequest,
        placement: Placement,
        delivery: Delivery,
        deadline: float | None,
    ) -> None:
        """Prepare an attempt.

        Args:
            request: with a room that no other attempt has.
            placement: the workers that serve it.
            delivery: takes its tokens.
            deadline: in the event loop's time; None has none.
        """
        self._request = request
        self._placement = placement
        self._delivery = delivery
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._called_prefill_at = 0.0
        self._prefill: asyncio.Task[None] | None = None
        self._prefill_error: ServingError | None = None
        self._prefill_failed = asyncio.Event()
        self._first_token = asyncio.Event()
        self._reply = worker_pb2.PrefillReply()

    async def run(self) -> None:
        """Serve the attempt until its last token is delivered.

        Raises:
            ServingError: why it could not be.
        """
        decode = self._placement.decode
        async with stoppable() as scope:
            with decode.watch(scope.stop):
                stream = decode.link.decode(self._request, self._remaining_s())
                try:
                    async with asyncio.TaskGroup() as tasks:
                        await self._read(stream, tasks, scope)
                except* ServingError as group:
                    raise _root_cause(group, self._prefill_error) from None
                finally:
                    stream.cancel()

    def usage(self) -> generate_pb2.Usage:
        """What the request consumed."""
        return generate_pb2.Usage(
            prompt_tokens=len(self._request.token_ids),
            completion_tokens=self._delivery.num_tokens,
            cached_tokens=self._reply.cached_tokens,
        )

    def timings(self, arrived_at: float) -> generate_pb2.Timings:
        """Where the time since ``arrived_at`` went."""
        delivery = self._delivery
        return generate_pb2.Timings(
            queue_ms=1000 * (self._called_prefill_at - arrived_at),
            prefill_queue_ms=self._reply.queue_ms,
            prefill_ms=self._reply.compute_ms,
            transfer_ms=self._reply.transfer_ms,
            first_token_ms=1000 * (delivery.first_at - arrived_at),
            per_token_ms=delivery.per_token_ms,
            total_ms=1000 * (self._loop.time() - arrived_at),
        )

    async def _read(self, stream: DecodeStream, tasks: asyncio.TaskGroup, scope: Scope) -> None:
        worker_id = self._placement.decode.identity.worker_id
        while not self._delivery.finish_reason:
            event = await self._next(stream)
            if event is None:
                raise WorkerError(
                    worker_id,
                    f"ended the stream of request {self._request.request_id} after "
                    f"{self._delivery.num_tokens} tokens without a finish reason",
                )
            match event.WhichOneof("event"):
                case "reserved" if self._prefill is None:
                    self._prefill = tasks.create_task(
                        self._call_prefill(event.reserved.target, scope),
                        name=f"{self._request.request_id}/prefill",
                    )
                case "chunk" if self._prefill is not None:
                    self._first_token.set()
                    await self._delivery.forward(event.chunk, worker_id)
                case kind:
                    raise WorkerError(worker_id, f"sent {kind} out of turn")
        await self._end(stream)

    async def _next(self, stream: DecodeStream) -> worker_pb2.DecodeEvent | None:
        try:
            return await stream.next()
        except TransferError:
            if self._prefill is not None and not self._first_token.is_set():
                await _happens(self._prefill_failed, _ROOT_CAUSE_S)
            raise

    async def _call_prefill(self, target: bytes, scope: Scope) -> None:
        prefill = self._placement.prefill
        self._called_prefill_at = self._loop.time()
        try:
            async with stoppable() as call:
                with prefill.watch(call.stop):
                    self._reply = await prefill.link.prefill(
                        self._request, target, self._remaining_s()
                    )
        except ServingError as error:
            self._prefill_error = error
            self._prefill_failed.set()
            if not await _happens(self._first_token, _ROOT_CAUSE_S):
                scope.stop(error)
            else:
                logger.info(
                    "request=%s goes on without prefill: %s", self._request.request_id, error
                )
        self._placement.prefilled()

    async def _end(self, stream: DecodeStream) -> None:
        """See both calls to their end; the answer is whole already, so nothing here fails it."""
        assert self._prefill is not None
        try:
            async with asyncio.timeout(_EPILOGUE_S):
                await asyncio.wait([self._prefill])
                while await stream.next() is not None:
                    pass
        except TimeoutError:
            logger.warning(
                "request=%s is answered, but its workers' calls did not end within %g s",
                *(self._request.request_id, _EPILOGUE_S),
            )
            self._prefill.cancel()
        except ServingError as error:
            logger.info("request=%s failed once answered: %s", self._request.request_id, error)

    def _remaining_s(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())


async def _happens(event: asyncio.Event, within_s: float) -> bool:
    """Whether ``event`` is set by then."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _root_cause(
    group: ExceptionGroup[ServingError], prefill_error: ServingError | None
) -> ServingError:
    """The most telling error: a death, then anything but a transfer error."""
    errors: list[ServingError] = []
    for error in group.exceptions:
        assert isinstance(error, ServingError)  # no groups in groups: tasks raise none
        errors.append(error)
    if prefill_error is not None:
        errors.append(prefill_error)
    return min(
        errors,
        key=lambda error: (not isinstance(error, WorkerLost), isinstance(error, TransferError)),
    )
