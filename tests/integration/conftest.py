"""Real prefill and decode workers in this process, on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tandem.config.tree import TandemConfig
from tandem.device import DeviceThread
from tandem.models.model import Model
from tandem.models.registry import load_model
from tandem.requests import GenerateRequest
from tandem.testing.pair import Completion, Pair, connect
from tandem.testing.reference import straight_line
from tandem.testing.tiny import write_tiny_llama
from tandem.tokenizer import load_tokenizer
from tandem.weights.store import ModelFolder, prepare

SECRET = bytes(range(32))

Configure = Callable[..., TandemConfig]
Running = Callable[..., AbstractAsyncContextManager[tuple[Pair, asyncio.Event]]]
WithPair = Callable[..., None]
Expected = Callable[[GenerateRequest], Completion]


@pytest.fixture(scope="session")
def secret() -> bytes:
    return SECRET


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_llama(path, max_context=512)
    return prepare(str(path))


@pytest.fixture(scope="session")
def model(folder: ModelFolder) -> Model:
    return load_model(folder, "float32")


@pytest.fixture(scope="session")
def expected(folder: ModelFolder, model: Model) -> Expected:
    """What a request must bring, generated without any cluster."""
    tokenizer = load_tokenizer(folder)

    def generate(request: GenerateRequest) -> Completion:
        return Completion(chunks=straight_line(model, tokenizer, request))

    return generate


@pytest.fixture(scope="session")
def config() -> Configure:
    """A small configuration with changes, by section."""

    def configure(**changes: dict[str, Any]) -> TandemConfig:
        base = TandemConfig()
        settings: dict[str, dict[str, Any]] = {
            "prefill": {"num_pages": 80, "threads": 1, "chunk_tokens": 64},
            "decode": {"num_pages": 160, "threads": 1, "graph": "off"},
            "workers": {"drain_timeout_s": 20.0},
        }
        for section, fields in changes.items():
            settings[section] = settings.get(section, {}) | fields
        return replace(
            base,
            **{name: replace(getattr(base, name), **fields) for name, fields in settings.items()},
        )

    return configure


@pytest.fixture(scope="session")
def running(folder: ModelFolder) -> Running:
    """Both workers; they have drained when the block is left."""

    @asynccontextmanager
    async def run(
        settings: TandemConfig,
        *,
        prefill: type[PrefillWorker] = PrefillWorker,
        decode: type[DecodeWorker] = DecodeWorker,
        decode_settings: TandemConfig | None = None,
        device_thread: DeviceThread | None = None,
        registry_address: str | None = None,
    ) -> AsyncIterator[tuple[Pair, asyncio.Event]]:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        ready: list[asyncio.Future[str]] = [loop.create_future() for _ in range(2)]
        first = prefill(settings, folder, SECRET, "prefill-0", registry_address, device_thread)
        second = decode(
            decode_settings or settings,
            folder,
            SECRET,
            "decode-0",
            registry_address,
            device_thread,
        )
        async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
            tasks.create_task(first.run(stopping, ready[0].set_result))
            tasks.create_task(second.run(stopping, ready[1].set_result))
            async with connect(await ready[0], await ready[1], SECRET) as pair:
                yield pair, stopping
                stopping.set()

    return run


@pytest.fixture(scope="session")
def with_pair(running: Running) -> WithPair:
    """Run a body with both workers, and check that it left nothing behind in them."""

    def run(
        settings: TandemConfig, body: Callable[[Pair], Awaitable[None]], **workers: Any
    ) -> None:
        async def scenario() -> None:
            async with running(settings, **workers) as (pair, _):
                await body(pair)
                await pair.idle()

        asyncio.run(scenario())

    return run
