from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_worker.engine import DecodeEngine, OutputRules, Reserved
from decode_worker.scheduler import DecodeScheduler
from tandem.cache.pages import PageAllocator
from tandem.config.tree import DecodeConfig
from tandem.device import DeviceThread
from tandem.errors import PeerLost, RequestError, TransferCorrupt, TransferError, WorkerError
from tandem.models.model import DecodeRow
from tandem.requests import GenerateRequest, Handover, OutputChunk, Room, SampledToken
from tandem.testing.reference import new_request
from tandem.testing.tiny import TINY_EOS_TOKEN_ID, TINY_VOCAB_SIZE, write_tiny_llama
from tandem.tokenizer import Tokenizer, load_tokenizer
from tandem.weights.store import prepare
from tandem.workers import WorkerStatus

PAGE = 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_llama(folder)
    return load_tokenizer(prepare(str(folder)))


def request(room: int, prompt_tokens: int = 5, max_tokens: int = 4) -> GenerateRequest:
    made = new_request(range(prompt_tokens), max_tokens, ignore_eos=False)
    return replace(made, room=Room(room))


class FakeReservation:
    """Its transfer and its quiescence are events of the test."""

    def __init__(self, page_ids: Sequence[int], num_tokens: int) -> None:
        self.target = b"target"
        self.page_ids = list(page_ids)
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
        self, request_id: str, room: int, page_ids: Sequence[int], num_tokens: int
    ) -> FakeReservation:
        self.reservations[room] = FakeReservation(page_ids, num_tokens)
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


class World:
    def __init__(self, tokenizer: Tokenizer, usable_pages: int, max_unread: int) -> None:
        self.receiver = FakeReceiver()
        self.runner = CountingRunner()
        self.pages = PageAllocator(usable_pages + 1)
        self.device = DeviceThread("device")
        self.engine = DecodeEngine(
            worker_id="decode-0",
            scheduler=DecodeScheduler(self.pages, PAGE, 64, DecodeConfig(max_queued_requests=4)),
            runner=self.runner,
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
        body: Callable[[World], Awaitable[None]], usable_pages: int = 16, max_unread: int = 8
    ) -> None:
        async def run() -> None:
            world = World(tokenizer, usable_pages, max_unread)
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


def test_the_handed_over_token_comes_first_and_counts(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        call = await world.started(request(1))
        reservation = world.receiver.reservations[1]
        assert len(reservation.page_ids) == 2
        assert world.engine.status().running == 1
        reservation.land(70)
        chunks = await call
        assert tokens_of(chunks) == [70, 71, 72, 73]
        assert chunks[-1].finish_reason == "length"
        assert "".join(chunk.text for chunk in chunks) == "FGHI"
        assert [[(row.token_id, row.position) for row in step] for step in world.runner.steps] == [
            [(70, 5)],
            [(71, 6)],
            [(72, 7)],
        ]
        assert reservation.released == 1
        await world.idle()

    scenario(body)


def test_the_target_is_told_before_anything_else(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        events = world.engine.decode(request(1))
        assert await anext(events) == Reserved(target=b"target")
        await events.aclose()
        await world.idle()

    scenario(body)


@pytest.mark.parametrize(
    ("token_id", "max_tokens", "reason"), [(TINY_EOS_TOKEN_ID, 9, "stop"), (70, 1, "length")]
)
def test_the_first_token_may_be_the_last(
    scenario: Scenario, token_id: int, max_tokens: int, reason: str
) -> None:
    async def body(world: World) -> None:
        call = await world.started(request(1, max_tokens=max_tokens))
        world.receiver.reservations[1].land(token_id)
        (chunk,) = await call
        assert (chunk.token_ids, chunk.finish_reason) == ((token_id,), reason)
        assert world.runner.steps == []
        await world.idle()

    scenario(body)


def test_requests_join_and_leave_the_batch_as_they_come(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        world.runner.gate.clear()
        early = await world.started(request(1, max_tokens=4))
        world.receiver.reservations[1].land(10)
        await asyncio.to_thread(world.runner.begun.wait)
        late = await world.started(request(2, max_tokens=3))
        world.receiver.reservations[2].land(100)
        await world.until(lambda s: world.receiver.reservations[2].released == 1)
        world.runner.gate.set()
        assert tokens_of(await early) == [10, 11, 12, 13]
        assert tokens_of(await late) == [100, 101, 102]
        assert [len(step) for step in world.runner.steps] == [1, 2, 2]
        await world.idle()

    scenario(body)


def test_waits_for_pages_in_order_and_takes_them_when_they_are_back(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        first = await world.started(request(1, 5, 4))
        second = asyncio.create_task(world.collect(request(2, 5, 4)))
        await world.until(lambda s: s.queued == 1)
        assert 2 not in world.receiver.reservations
        world.receiver.reservations[1].land(10)
        await first
        await world.until(lambda s: 2 in world.receiver.reservations)
        world.receiver.reservations[2].land(20)
        assert tokens_of(await second) == [20, 21, 22, 23]

    scenario(body, usable_pages=3)


def test_a_slow_reader_pauses_its_own_request_only(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        slow = world.engine.decode(request(1, max_tokens=12))
        await anext(slow)
        world.receiver.reservations[1].land(10)
        first = await anext(slow)
        assert isinstance(first, OutputChunk)
        assert first.token_ids == (10,)
        fast = await world.started(request(2, max_tokens=9))
        world.receiver.reservations[2].land(100)
        assert len(tokens_of(await fast)) == 9
        await world.until(lambda s: len(world.runner.steps) >= 8)
        assert max(row.position for step in world.runner.steps for row in step) <= 13
        chunks = [first, *[event async for event in slow if isinstance(event, OutputChunk)]]
        assert tokens_of(chunks) == list(range(10, 22))
        assert len(chunks[1].token_ids) == 3  # as many as may be unread, in one chunk
        await world.idle()

    scenario(body, max_unread=3)


def test_cancelled_in_the_queue(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        first = await world.started(request(1))
        waiting = asyncio.create_task(world.collect(request(2)))
        await world.until(lambda s: s.queued == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert world.engine.status().queued == 0
        first.cancel()
        await world.idle()

    scenario(body, usable_pages=2)


def test_cancelled_during_the_transfer_its_pages_wait_for_the_writer(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        call = await world.started(request(1))
        reservation = world.receiver.reservations[1]
        reservation.quiet.clear()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await world.until(lambda s: reservation.released == 1)
        assert world.engine.status().pages_used == 2
        reservation.quiet.set()
        await world.idle()

    scenario(body)


def test_cancelled_during_a_step_its_pages_wait_for_the_step(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        world.runner.gate.clear()
        call = await world.started(request(1))
        other = await world.started(request(2))
        for room in (1, 2):
            world.receiver.reservations[room].land(10 * room)
        await asyncio.to_thread(world.runner.begun.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert world.engine.status().pages_used == 4
        world.runner.gate.set()
        assert tokens_of(await other) == [20, 21, 22, 23]
        await world.idle()

    scenario(body)


def test_a_transfer_that_fails_fails_its_request(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        call = await world.started(request(1))
        world.receiver.reservations[1].break_off(PeerLost("r1", "reset"))
        with pytest.raises(PeerLost):
            await call
        await world.idle()
        assert world.receiver.reservations[1].released == 1

    scenario(body)


@pytest.mark.parametrize(
    ("token_id", "prompt_tokens", "match"),
    [(70, 4, "computed 4 of 5"), (TINY_VOCAB_SIZE, 5, "no token has the id"), (-1, 5, "no token")],
)
def test_a_handover_that_does_not_fit_is_refused(
    scenario: Scenario, token_id: int, prompt_tokens: int, match: str
) -> None:
    async def body(world: World) -> None:
        call = await world.started(request(1))
        world.receiver.reservations[1].land(token_id, prompt_tokens)
        with pytest.raises(TransferCorrupt, match=match):
            await call
        await world.idle()

    scenario(body)


def test_a_model_error_fails_the_requests_of_its_step_and_the_loop_lives(
    scenario: Scenario,
) -> None:
    async def body(world: World) -> None:
        world.runner.error = ZeroDivisionError("bad kernel")
        call = await world.started(request(1))
        world.receiver.reservations[1].land(10)
        with pytest.raises(WorkerError, match="ZeroDivisionError: bad kernel"):
            await call
        await world.idle()
        world.runner.error = None
        call = await world.started(request(2))
        world.receiver.reservations[2].land(20)
        assert tokens_of(await call) == [20, 21, 22, 23]

    scenario(body)


def test_a_room_is_one_request(scenario: Scenario) -> None:
    async def body(world: World) -> None:
        call = await world.started(request(1))
        with pytest.raises(RequestError, match="in use"):
            await world.collect(request(1))
        world.receiver.reservations[1].land(10)
        await call
        del world.receiver.reservations[1]
        again = await world.started(request(1))
        world.receiver.reservations[1].land(10)
        await again

    scenario(body)
