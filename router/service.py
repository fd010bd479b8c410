"""The public gRPC service: what callers see of requests, model and workers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

from router.admission import Admission
from router.life import Lives
from router.registry import Member, Registry
from tandem import __version__
from tandem.config.tree import Mode
from tandem.errorcodes import abort
from tandem.errors import ServingError
from tandem.pb import generate_pb2, generate_pb2_grpc

_STATUS_TIMEOUT_S = 1.0

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """What is known of the served model without asking a worker."""

    name: str
    architecture: str
    weights_digest: str
    vocab_size: int
    max_context_tokens: int
    dtype: str
    """As configured; workers know what became of `auto`."""
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]


class TandemService(generate_pb2_grpc.TandemServicer):
    """Maps calls to the router's parts, and their errors to statuses."""

    def __init__(
        self, mode: Mode, card: ModelCard, lives: Lives, admission: Admission, registry: Registry
    ) -> None:
        self._mode = mode
        self._card = card
        self._lives = lives
        self._admission = admission
        self._registry = registry

    async def Generate(  # type: ignore[override]  # noqa: N802 - writes instead of yielding
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> None:
        """Serve one request; ends the call with its error when it fails."""
        try:
            await self._lives.serve(request, context.time_remaining(), context.write)
        except ServingError as error:
            await abort(context, error)

    async def Abort(  # noqa: N802
        self, request: generate_pb2.AbortRequest, context: Context
    ) -> generate_pb2.AbortResponse:
        """Stop a request by its id; one that is unknown or over is not found."""
        return generate_pb2.AbortResponse(found=self._lives.abort(request.request_id))

    async def GetModelInfo(  # noqa: N802
        self, request: generate_pb2.GetModelInfoRequest, context: Context
    ) -> generate_pb2.GetModelInfoResponse:
        """The served model, and the longest prompt that the workers of this moment can hold."""
        card, pools = self._card, self._registry.pools()
        limit = card.max_context_tokens
        if pools is not None:
            limit = min(limit, pools.prefill_tokens, pools.decode_tokens)
        ready = [member for member in self._registry.members if member.ready]
        return generate_pb2.GetModelInfoResponse(
            model=card.name,
            architecture=card.architecture,
            weights_digest=card.weights_digest,
            vocab_size=card.vocab_size,
            max_context_tokens=card.max_context_tokens,
            max_prompt_tokens=limit - 1,
            dtype=ready[0].identity.model.dtype if ready else card.dtype,
            has_chat_template=card.has_chat_template,
            eos_token_ids=card.eos_token_ids,
        )

    async def GetStatus(  # noqa: N802
        self, request: generate_pb2.GetStatusRequest, context: Context
    ) -> generate_pb2.GetStatusResponse:
        """All workers, each asked now; those that do not answer as of their last report."""
        async with asyncio.TaskGroup() as questions:
            answers = [
                questions.create_task(self._ask(member), name=f"status/{member.identity.worker_id}")
                for member in self._registry.members
            ]
        return generate_pb2.GetStatusResponse(
            version=__version__,
            mode=self._mode,
            requests_running=self._admission.running,
            requests_queued=self._admission.queued,
            workers=[answer.result() for answer in answers],
        )

    async def _ask(self, member: Member) -> generate_pb2.WorkerState:
        status = replace(member.status, state="unreachable")
        if not member.lost:
            try:
                status = await member.link.status(_STATUS_TIMEOUT_S)
            except ServingError:
                status = replace(member.status, state="unreachable")
        state = status.to_wire(member.identity)
        state.problem = self._registry.problem(member) if member.ready else ""
        return state
