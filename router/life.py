"""The life of a request, as one coroutine.

    check -> (tokenize) -> wait for a slot -> choose two workers -> open the decode stream
    -> decode has reserved pages: call prefill -> forward tokens -> finished

Whatever ends it, both workers' calls are cancelled and the caller gets exactly one status. An
attempt that fails almost at once because a worker is gone, with nothing sent yet, found a worker
that was dying when it was chosen: the request starts over on others, and its caller sees nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from router.admission import Admission
from router.delivery import Delivery, Write
from router.legs import Legs
from router.policy import Need, Pair
from router.registry import Registry
from router.scope import Scope, stoppable
from router.tokenize import PromptEncoder
from router.validation import Checked, Rules, check, complete, new_room
from tandem.errors import (
    DeadlineExceeded,
    RequestCancelled,
    RequestError,
    RequestTooLong,
    WorkerLost,
)
from tandem.pb import generate_pb2
from tandem.requests import GenerateRequest

logger = logging.getLogger(__name__)

_STALE_S = 0.5  # a worker that is gone within this time was dying when it was chosen
_MAX_ATTEMPTS = 4


class Lives:
    """All requests between their acceptance and their end."""

    def __init__(
        self,
        rules: Rules,
        encoder: PromptEncoder,
        admission: Admission,
        registry: Registry,
        worker_wait_s: float,
    ) -> None:
        self._rules = rules
        self._encoder = encoder
        self._admission = admission
        self._registry = registry
        self._worker_wait_s = worker_wait_s
        self._scopes: dict[str, Scope] = {}
        self._loop = asyncio.get_running_loop()
        self._empty = asyncio.Event()
        self._empty.set()
        self._stopping = False

    async def serve(
        self, message: generate_pb2.GenerateRequest, timeout_s: float | None, write: Write
    ) -> None:
        """Serve one request to its last message.

        Args:
            message: as the caller sent it.
            timeout_s: time until its deadline; None has none.
            write: sends a message to the caller.

        Raises:
            ServingError: the one status it ends with instead.
        """
        arrived = self._loop.time()
        if self._stopping:
            raise WorkerLost("router", "it is stopping; send the request to another one")
        checked = check(message, self._rules)
        expired = None
        if timeout_s is not None:
            expired = DeadlineExceeded(checked.request_id, "its deadline passed")
        async with stoppable(timeout_s, expired) as scope:
            with self._enter(checked.request_id, scope):
                await self._run(checked, arrived, timeout_s, write)

    def abort(self, request_id: str) -> bool:
        """Stop a request; False if there is none of that name."""
        scope = self._scopes.get(request_id)
        if scope is None:
            return False
        scope.stop(RequestCancelled(request_id, "it was aborted"))
        return True

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and let running ones finish; stop those left after ``timeout_s``."""
        self._stopping = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            logger.warning(
                "requests=%d did not finish within workers.drain_timeout_s=%g and end unavailable",
                *(len(self._scopes), timeout_s),
            )
            for scope in tuple(self._scopes.values()):
                scope.stop(WorkerLost("router", "it stopped before the request was finished"))
            await self._empty.wait()

    @contextmanager
    def _enter(self, request_id: str, scope: Scope) -> Iterator[None]:
        if request_id in self._scopes:
            raise RequestError(
                "request_id",
                f"{request_id!r} is the name of a request that is still running; choose another",
            )
        self._scopes[request_id] = scope
        self._empty.clear()
        try:
            yield
        finally:
            del self._scopes[request_id]
            if not self._scopes:
                self._empty.set()

    async def _run(
        self, checked: Checked, arrived: float, timeout_s: float | None, write: Write
    ) -> None:
        self._admission.refuse_if_full()
        token_ids = await self._encoder.encode(checked)
        request = complete(checked, token_ids, self._rules, self._registry.pools())
        delivery = Delivery(request.request_id, write, self._loop.time)
        deadline = None if timeout_s is None else arrived + timeout_s
        async with self._admission.slot():
            for attempt in range(1, _MAX_ATTEMPTS + 1):
                request, pair = await self._place(checked, request)
                started = self._loop.time()
                try:
                    with self._registry.charge(pair, _need(request)) as placement:
                        legs = Legs(request, placement, delivery, deadline)
                        await legs.run()
                    break
                except WorkerLost as lost:
                    self._registry.suspect(lost.worker_id)
                    late = self._loop.time() - started > _STALE_S
                    if late or delivery.num_tokens or attempt == _MAX_ATTEMPTS:
                        raise
                    logger.info("request=%s starts over: %s", request.request_id, lost)
                    request = replace(request, room=new_room())
            await delivery.finish(legs.usage(), legs.timings(arrived))

    async def _place(
        self, checked: Checked, request: GenerateRequest
    ) -> tuple[GenerateRequest, Pair]:
        """Choose workers, and cut the request to their pools when they were not known before.

        Raises:
            WorkerLost: none was ready in time.
            RequestTooLong: it fits on none.
        """
        await self._registry.wait(self._worker_wait_s)
        pair = self._registry.choose(_need(request))
        if pair is None:
            request = complete(checked, request.token_ids, self._rules, self._registry.pools())
            pair = self._registry.choose(_need(request))
        if pair is None:
            raise RequestTooLong(
                checked.prompt_field,
                f"and its output have {request.max_total_tokens} tokens, which no ready pair of "
                "workers can hold; ask for less",
            )
        return request, pair


def _need(request: GenerateRequest) -> Need:
    return Need(prompt_tokens=len(request.token_ids), total_tokens=request.max_total_tokens)
