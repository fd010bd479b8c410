from __future__ import annotations

import asyncio
from contextlib import aclosing

import grpc
import grpc.aio
import pytest

from launcher.client import Client, chat_request, text_request
from tests.launcher.conftest import ScriptedServer


def test_a_generation_is_its_whole_stream(server: ScriptedServer) -> None:
    async def scenario() -> None:
        async with Client(f"grpc://{server.address}") as client:
            generation = await client.generate(text_request("hello", max_tokens=3))
        assert generation.text == "Sí... €"
        assert generation.token_ids == [7, 8, 9]
        assert generation.finish_reason == "length"
        assert generation.usage.cached_tokens == 4
        assert generation.timings.total_ms == 12.25

    asyncio.run(scenario())
    (request,) = server.requests
    assert (request.text, request.stopping.max_tokens) == ("hello", 3)
    assert not request.HasField("sampling")


def test_closing_the_stream_cancels_the_request(server: ScriptedServer) -> None:
    server.endless = True

    async def scenario() -> None:
        async with (
            Client(server.address) as client,
            aclosing(client.stream(chat_request([("user", "hello")]))) as responses,
        ):
            assert (await anext(responses)).chunk.text == "Sí"

    asyncio.run(scenario())
    assert server.cancelled.wait(30)
    assert server.requests[0].chat.messages[0].content == "hello"


def test_a_failed_call_raises_its_status(server: ScriptedServer) -> None:
    server.failure = (grpc.StatusCode.INVALID_ARGUMENT, "top_p: must be above 0")

    async def scenario() -> None:
        async with Client(server.address) as client:
            await client.generate(text_request("hello"))

    with pytest.raises(grpc.aio.AioRpcError, match="top_p: must be above 0"):
        asyncio.run(scenario())


def test_the_other_calls(server: ScriptedServer) -> None:
    async def scenario() -> None:
        async with Client(server.address) as client:
            assert await client.abort("r1")
            assert not await client.abort("another")
            assert (await client.model_info()).model == "scripted"
            assert (await client.status()).requests_running == 2

    asyncio.run(scenario())
