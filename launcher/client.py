"""A small asynchronous client of the public API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc.aio

from tandem.config.tree import LimitsConfig
from tandem.pb import generate_pb2, generate_pb2_grpc
from tandem.rpc import channel_options

FINISH_REASONS = {
    generate_pb2.FINISH_REASON_STOP: "stop",
    generate_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(kw_only=True, slots=True)
class Generation:
    """A whole answer, put together from its stream."""

    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[generate_pb2.Logprobs] = field(default_factory=list)
    finish_reason: str = ""
    """stop or length; empty until the stream has ended."""
    usage: generate_pb2.Usage = field(default_factory=generate_pb2.Usage)
    timings: generate_pb2.Timings = field(default_factory=generate_pb2.Timings)

    def add(self, response: generate_pb2.GenerateResponse) -> None:
        """Append one message of the stream."""
        self.request_id = response.request_id or self.request_id
        if response.HasField("chunk"):
            self.text += response.chunk.text
            self.token_ids += response.chunk.token_ids
            self.logprobs += response.chunk.logprobs
        if response.HasField("finished"):
            self.finish_reason = FINISH_REASONS[response.finished.finish_reason]
            self.usage = response.finished.usage
            self.timings = response.finished.timings


class Client:
    """Calls one server; use it as ``async with Client(address) as client``.

    Failed calls raise `grpc.aio.AioRpcError` with the status and message the server gave.
    """

    def __init__(self, address: str, limits: LimitsConfig | None = None) -> None:
        """Remember where to call; the connection is made by the first call.

        Args:
            address: ``host:port``, or ``grpc://host:port`` as `tandem serve` prints it.
            limits: the server's, when they are not the defaults.
        """
        self._channel = grpc.aio.insecure_channel(
            address.removeprefix("grpc://"),
            # A proxy for the web has no business between a client and its own server.
            options=(*channel_options(limits or LimitsConfig()), ("grpc.enable_http_proxy", 0)),
        )
        self._stub: generate_pb2_grpc.TandemAsyncStub = generate_pb2_grpc.TandemStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def stream(
        self, request: generate_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Messages of one generation as they come; closing the iterator cancels the request."""
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()  # does nothing to a stream that has ended

    async def generate(
        self, request: generate_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> Generation:
        """One generation, whole."""
        generation = Generation()
        async with aclosing(self.stream(request, timeout_s)) as responses:
            async for response in responses:
                generation.add(response)
        return generation

    async def abort(self, request_id: str) -> bool:
        """Stop a running request; whether there was one."""
        return (await self._stub.Abort(generate_pb2.AbortRequest(request_id=request_id))).found

    async def model_info(self) -> generate_pb2.GetModelInfoResponse:
        """What is served."""
        return await self._stub.GetModelInfo(generate_pb2.GetModelInfoRequest())

    async def status(self, timeout_s: float | None = None) -> generate_pb2.GetStatusResponse:
        """How the server and its workers are doing."""
        return await self._stub.GetStatus(generate_pb2.GetStatusRequest(), timeout=timeout_s)


def text_request(text: str, *, max_tokens: int | None = None) -> generate_pb2.GenerateRequest:
    """A request to continue ``text``."""
    request = generate_pb2.GenerateRequest(text=text)
    if max_tokens is not None:
        request.stopping.max_tokens = max_tokens
    return request


def chat_request(
    messages: Sequence[tuple[str, str]], *, max_tokens: int | None = None
) -> generate_pb2.GenerateRequest:
    """A request to answer a chat of (role, content) turns."""
    request = generate_pb2.GenerateRequest()
    for role, content in messages:
        request.chat.messages.add(role=role, content=content)
    if max_tokens is not None:
        request.stopping.max_tokens = max_tokens
    return request
