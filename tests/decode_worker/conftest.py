"""A decode engine whose model, transfers and copies are the test's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_worker.engine import DecodeEngine, OutputRules
from decode_worker.scheduler import DecodeScheduler
from decode_worker.swap import PageSwap, SavedPages
from tandem.cache.groups import CacheGroup
from tandem.cache.pages import PageAllocator
from tandem.cache.pool import KVPool
from tandem.cache.prefix import PrefixCache
from tandem.config.tree import DecodeConfig
from tandem.device import DeviceThread
from tandem.errors import TransferError
from tandem.models.model import DecodeRow
from tandem.requests import GenerateRequest, Handover, OutputChunk, Room, SampledToken
from tandem.testing.reference import new_request
from tandem.testing.tiny import TINY_VOCAB_SIZE, write_tiny_llama
from tandem.tokenizer import Tokenizer, load_tokenizer
from tandem.weights.store import prepare
from tandem.workers import WorkerStatus

PAGE = 4
GROUPS = (
    CacheGroup(name="k", num_layers=1, page_tokens=PAGE, token_shape=(1, 1), dtype="float32"),
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_llama(folder)
    return load_tokenizer(prepare(str(folder)))


def new_work(room: int, prompt_tokens: int = 5, max_tokens: int = 4) -> GenerateRequest:
    made = new_request(range(prompt_tokens), max_tokens, ignore_eos=False)
    return replace(made, room=Room(room))


class FakeReservation:
    """Its transfer and its quiescence are events of the test."""

    def __init__(self, page_ids: Sequence[int], num_tokens: int, first_page: int) -> None:
        self.target = b"target"
        self.page_ids = list(page_ids)
        self.first_page = first_page
        self.num_tokens = num_tokens
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.released = 0
        self._handover: asyncio.Future[Handover] = asyncio.get_running_loop().create_future()

    def land(self, token_id: int, prompt_tokens: int | None = None) -> None:
        self._handover.set_result(
            Handover(
                first_token=SampledToken(token_id=token_id),
                prompt_tokens=self.num_tokens if prompt_tokens is None else prompt_tokens,
                cached_tokens=0,
            )
        )

    def break_off(self, error: TransferError) -> None:
        self._handover.set_exception(error)

    async def wait(self) -> Handover:
        return await asyncio.shield(self._handover)

    async def release(self) -> None:
        self.released += 1
        await self.quiet.wait()


class FakeReceiver:
    def __init__(self) -> None:
        self.reservations: dict[int, FakeReservation] = {}
        self.pending = 0

    def reserve(
        self,
        request_id: str,
        room: int,
        page_ids: Sequence[int],
        num_tokens: int,
        first_page: int = 0,
    ) -> FakeReservation:
        self.reservations[room] = FakeReservation(page_ids, num_tokens, first_page)
        return self.reservations[room]


class CountingRunner:
    """The next token is the last one plus one; a test can hold it back or break it."""

    graph_summary = "eager"

    def __init__(self) -> None:
        self.steps: list[list[DecodeRow]] = []
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def step(self, rows: Sequence[DecodeRow]) -> torch.Tensor:
        self.steps.append(list(rows))
        self.begun.set()
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        tokens = torch.tensor([row.token_id + 1 for row in rows])
        return torch.nn.functional.one_hot(tokens, TINY_VOCAB_SIZE).float()


class GatedSwap(PageSwap):
    """Its saves can be held back or broken."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def save(self, page_ids: Sequence[int]) -> SavedPages:
        self.begun.set()
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return super().save(page_ids)


class World:
    def __init__(
        self, tokenizer: Tokenizer, usable_pages: int, max_unread: int, growth: int
    ) -> None:
        self.receiver = FakeReceiver()
        self.swap = GatedSwap(KVPool(GROUPS, usable_pages + 1))
        self.runner = CountingRunner()
        self.pages = PageAllocator(usable_pages + 1)
        prefix = PrefixCache(self.pages, PAGE)
        config = DecodeConfig(max_queued_requests=4, growth_pages=growth)
        self.device = DeviceThread("device")
        self.engine = DecodeEngine(
            worker_id="decode-0",
            scheduler=DecodeScheduler(self.pages, prefix, 64, config, swap_pages=2 * usable_pages),
            runner=self.runner,
            swap=self.swap,
            rules=OutputRules(
                tokenizer=tokenizer,
                vocab_size=TINY_VOCAB_SIZE,
                max_context_tokens=64,
                max_unread_chunks=max_unread,
            ),
            receiver=self.receiver,  # type: ignore[arg-type]
            device_thread=self.device,
        )

    async def until(self, holds: Callable[[WorkerStatus], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds(self.engine.status()):  # noqa: ASYNC110 - a status has no event
                await asyncio.sleep(0.001)

    async def idle(self) -> None:
        await self.until(lambda s: (s.pages_used, s.running, s.queued) == (0, 0, 0))

    async def collect(self, work: GenerateRequest) -> list[OutputChunk]:
        chunks: list[OutputChunk] = []
        async with aclosing(self.engine.decode(work)) as events:
            chunks += [event async for event in events if isinstance(event, OutputChunk)]
        return chunks

    async def started(self, work: GenerateRequest) -> asyncio.Task[list[OutputChunk]]:
        """Begin a request whose prompt has not landed yet."""
        task = asyncio.create_task(self.collect(work))
        await self.until(lambda s: work.room in self.receiver.reservations)
        return task


@pytest.fixture(name="scenario")
def scenario_runner(
    tokenizer: Tokenizer,
) -> Callable[..., None]:
    def scenario(
        body: Callable[[World], Awaitable[None]],
        usable_pages: int = 16,
        max_unread: int = 8,
        growth: int = 4,
    ) -> None:
        async def run() -> None:
            world = World(tokenizer, usable_pages, max_unread, growth)
            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                engine = tasks.create_task(world.engine.run())
                await body(world)
                engine.cancel()
            world.device.close()

        asyncio.run(run())

    return scenario


Scenario = Callable[..., None]


def tokens_of(chunks: Sequence[OutputChunk]) -> list[int]:
    assert [chunk.finish_reason is not None for chunk in chunks] == [
        place == len(chunks) - 1 for place in range(len(chunks))
    ]
    count = 0
    for chunk in chunks:
        assert chunk.index == count
        count += len(chunk.token_ids)
    return [token_id for chunk in chunks for token_id in chunk.token_ids]
