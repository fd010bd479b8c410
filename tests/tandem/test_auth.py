from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.auth import ClusterAuth, ClusterToken

SECRET = bytes(range(32))


async def _unary(_request: Any, _context: Any) -> bytes:
    return b"in"


async def _stream(_request: Any, _context: Any) -> AsyncIterator[bytes]:
    yield b"in"


_HANDLERS: dict[str, Any] = {
    "UnaryUnary": grpc.unary_unary_rpc_method_handler(_unary),
    "UnaryStream": grpc.unary_stream_rpc_method_handler(_stream),
    "StreamUnary": grpc.stream_unary_rpc_method_handler(_unary),
    "StreamStream": grpc.stream_stream_rpc_method_handler(_stream),
}


def with_server(body: Callable[[Any], Awaitable[Any]]) -> Any:
    async def scenario() -> Any:
        server = grpc.aio.server(interceptors=(ClusterAuth(ClusterToken(SECRET)),))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", _HANDLERS),))
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                return await body(channel)
        finally:
            await server.stop(None)

    return asyncio.run(scenario())


async def call(channel: Any, method: str, metadata: Any) -> bytes:
    path = f"/t.T/{method}"
    match method:
        case "UnaryUnary":
            return bytes(await channel.unary_unary(path)(b"", metadata=metadata))
        case "StreamUnary":
            return bytes(await channel.stream_unary(path)(iter([b""]), metadata=metadata))
        case "UnaryStream":
            return b"".join(
                [part async for part in channel.unary_stream(path)(b"", metadata=metadata)]
            )
        case _:
            stream = channel.stream_stream(path)(iter([b""]), metadata=metadata)
            return b"".join([part async for part in stream])


@pytest.mark.parametrize("method", list(_HANDLERS))
def test_token_opens_every_kind_of_call(method: str) -> None:
    good = ClusterToken(SECRET).metadata
    assert with_server(lambda channel: call(channel, method, good)) == b"in"


@pytest.mark.parametrize("method", list(_HANDLERS))
@pytest.mark.parametrize(
    "metadata",
    [
        None,
        (("authorization", ""),),
        (("authorization", f"Bearer {SECRET.hex()[:-1]}0"),),
        (("authorization", SECRET.hex()),),
        (("x-authorization", f"Bearer {SECRET.hex()}"),),
    ],
)
def test_anything_else_is_refused(method: str, metadata: Any) -> None:
    async def body(channel: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, method, metadata)
        return caught.value.code()

    assert with_server(body) is grpc.StatusCode.UNAUTHENTICATED


def test_health_is_open_and_unknown_methods_stay_unknown() -> None:
    async def body(channel: Any) -> tuple[int, grpc.StatusCode]:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t.T/Nothing")(b"")
        return reply.status, caught.value.code()

    assert with_server(body) == (
        health_pb2.HealthCheckResponse.SERVING,
        grpc.StatusCode.UNIMPLEMENTED,
    )


def test_token_compares_bytes_and_text_and_refuses_short_secrets() -> None:
    token = ClusterToken(SECRET)
    ((key, value),) = token.metadata
    assert key == "authorization"
    assert token.matches(value)
    assert token.matches(value.encode())
    assert not token.matches("Bearer \u00e9")
    with pytest.raises(ValueError, match="16 bytes"):
        ClusterToken(b"short")
