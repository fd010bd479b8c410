from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch

from kv_transfer.counters import TransferStats
from prefill_worker.engine import PrefillEngine, PrefillOutcome, Vocabulary
from prefill_worker.scheduler import PrefillScheduler
from tandem.cache.pages import PageAllocator
from tandem.cache.prefix import PrefixCache
from tandem.config.tree import PrefillConfig
from tandem.device import DeviceThread
from tandem.errors import PeerLost, TransferAborted, TransferError, WorkerError
from tandem.models.model import PrefillSequence
from tandem.requests import (
    GenerateRequest,
    Handover,
    RequestId,
    Room,
    SamplingParams,
    StopParams,
)
from tandem.workers import WorkerStatus

PAGE = 4
LAYERS = 2
VOCAB = 50


def request(name: str, num_tokens: int, first: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        room=Room(1),
        token_ids=tuple(range(first, first + num_tokens)),
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=1),
    )


class FakeStream:
    """Keeps what it is given; ends when the test says so, or at once when ``acknowledges``."""

    def __init__(self, sender: FakeSender, name: str) -> None:
        self.name = name
        self.sent: list[tuple[int, tuple[int, ...], int]] = []
        self.handover: Handover | None = None
        self.aborted = ""
        self.error: TransferError | None = None
        self._sender = sender
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()

    def send_layer(self, layer: int, page_ids: Sequence[int], first_page: int) -> None:
        if self.error is not None or self.aborted:
            raise self.error or TransferAborted(self.name, self.aborted)
        self.sent.append((layer, tuple(page_ids), first_page))
        self._sender.events.append(("send", self.name, layer))

    def finish(self, handover: Handover) -> None:
        if self.error is not None:
            raise self.error
        self.handover = handover
        if self._sender.acknowledges:
            self._ended.set()

    def abort(self, reason: str) -> None:
        self.aborted = self.aborted or reason
        if self.error is None:
            self.error = TransferAborted(self.name, reason)
        if self._sender.acknowledges:
            self._loop.call_soon_threadsafe(self._ended.set)

    def end(self, error: TransferError | None = None) -> None:
        self.error = error or self.error
        self._ended.set()

    async def wait(self) -> TransferStats:
        await self._ended.wait()
        if self.error is not None:
            raise self.error
        return TransferStats(transport="fake", frames=1, nbytes=77, early_bytes=0, duration_s=0.0)


class FakeSender:
    def __init__(self) -> None:
        self.streams: dict[str, FakeStream] = {}
        self.events: list[tuple[Any, ...]] = []
        self.acknowledges = True
        self.opened = asyncio.Event()
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.error: TransferError | None = None
        self.pending = 0

    async def open(self, target: bytes, request_id: str) -> FakeStream:
        self.opened.set()
        await self.may_open.wait()
        if self.error is not None:
            raise self.error
        return self.streams.setdefault(request_id, FakeStream(self, request_id))


class FakeRunner:
    """Answers each complete prompt with its last token id; a test can hold it back or break it."""

    def __init__(self, sender: FakeSender) -> None:
        self.passes: list[list[PrefillSequence]] = []
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self._events = sender.events

    def run(
        self, sequences: Sequence[PrefillSequence], on_layer: Callable[[int], None]
    ) -> torch.Tensor:
        self.passes.append(list(sequences))
        self.begun.set()
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        for layer in range(LAYERS):
            self._events.append(("computed", layer))
            on_layer(layer)
        rows = [sequence.token_ids[-1] for sequence in sequences if sequence.needs_logits]
        return torch.nn.functional.one_hot(torch.tensor(rows, dtype=torch.long), VOCAB).float()


class World:
    def __init__(self, usable_pages: int = 16) -> None:
        self.sender = FakeSender()
        self.runner = FakeRunner(self.sender)
        self.pages = PageAllocator(usable_pages + 1)
        prefix = PrefixCache(self.pages, PAGE, True)
        config = PrefillConfig(chunk_tokens=8, max_batch_requests=4, max_queued_requests=4)
        self.device = DeviceThread("device")
        self.engine = PrefillEngine(
            worker_id="prefill-0",
            scheduler=PrefillScheduler(self.pages, prefix, PAGE, config),
            runner=self.runner,
            num_layers=LAYERS,
            vocabulary=Vocabulary(size=VOCAB, eos_token_ids=()),
            sender=self.sender,  # type: ignore[arg-type]
            device_thread=self.device,
        )

    def prefill(self, name: str, num_tokens: int, first: int = 0) -> asyncio.Task[PrefillOutcome]:
        return asyncio.create_task(self.engine.prefill(request(name, num_tokens, first), b"target"))

    async def until(self, holds: Callable[[WorkerStatus], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds(self.engine.status()):  # noqa: ASYNC110 - a status has no event
                await asyncio.sleep(0.001)

    async def idle(self) -> None:
        await self.until(lambda s: (s.pages_used, s.running, s.queued) == (0, 0, 0))


def scenario(body: Callable[[World], Awaitable[None]], usable_pages: int = 16) -> None:
    async def run() -> None:
        world = World(usable_pages)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            engine = tasks.create_task(world.engine.run())
            await body(world)
            engine.cancel()
        world.device.close()

    asyncio.run(run())


def test_each_layer_of_each_chunk_leaves_as_it_is_computed() -> None:
    async def body(world: World) -> None:
        outcome = await world.prefill("r", 11)
        stream = world.sender.streams["r"]
        assert [(layer, len(pages), first) for layer, pages, first in stream.sent] == [
            (0, 2, 0),
            (1, 2, 0),
            (0, 1, 2),
            (1, 1, 2),
        ]
        assert world.sender.events[:4] == [
            ("computed", 0),
            ("send", "r", 0),
            ("computed", 1),
            ("send", "r", 1),
        ]
        assert stream.handover is not None
        assert stream.handover.first_token.token_id == 10
        assert (stream.handover.prompt_tokens, stream.handover.cached_tokens) == (11, 0)
        assert outcome.transferred_bytes == 77
        assert min(outcome.queue_ms, outcome.compute_ms, outcome.transfer_ms) >= 0
        assert world.engine.status().pages_used == 0

    scenario(body)


def test_reused_pages_are_sent_without_being_computed() -> None:
    async def body(world: World) -> None:
        await world.prefill("first", 9)
        world.runner.passes.clear()
        outcome = await world.prefill("again", 9)
        assert outcome.cached_tokens == 8
        assert [list(s.token_ids) for s in world.runner.passes[0]] == [[8]]
        sent = world.sender.streams["again"].sent
        assert [(layer, len(pages), first) for layer, pages, first in sent] == [
            (0, 2, 0),
            (1, 2, 0),
            (0, 1, 2),
            (1, 1, 2),
        ]
        earlier = world.sender.streams["first"].sent
        assert sent[0][1] == earlier[0][1]

    scenario(body)


def test_prompts_of_one_pass_get_their_own_tokens() -> None:
    async def body(world: World) -> None:
        world.runner.gate.clear()
        blocker = world.prefill("blocker", 1, 40)
        await asyncio.to_thread(world.runner.begun.wait)
        several = [world.prefill(f"r{n}", 2, 10 * n) for n in range(3)]
        await world.until(lambda s: s.queued == 3)
        world.runner.gate.set()
        await asyncio.gather(blocker, *several)
        assert [len(sequences) for sequences in world.runner.passes] == [1, 3]
        for n in range(3):
            handover = world.sender.streams[f"r{n}"].handover
            assert handover is not None
            assert handover.first_token.token_id == 10 * n + 1

    scenario(body)


def test_pages_stay_until_the_transfer_has_ended() -> None:
    async def body(world: World) -> None:
        world.sender.acknowledges = False
        call = world.prefill("r", 8)
        await world.until(lambda s: bool(world.runner.passes) and s.running == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        stream = world.sender.streams["r"]
        assert stream.aborted
        assert world.engine.status().pages_used == 2
        stream.end()
        await world.idle()

    scenario(body)


def test_cancelled_while_it_computes() -> None:
    async def body(world: World) -> None:
        world.runner.gate.clear()
        call = world.prefill("r", 16)
        await asyncio.to_thread(world.runner.begun.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await world.until(lambda s: s.running == 0)
        assert world.engine.status().pages_used == 4  # the pass still writes
        world.runner.gate.set()
        await world.idle()
        assert len(world.runner.passes) == 1
        assert world.sender.streams["r"].handover is None
        await world.prefill("next", 3)

    scenario(body)


def test_cancelled_while_it_waits_for_pages() -> None:
    async def body(world: World) -> None:
        world.sender.acknowledges = False
        first = world.prefill("first", 16)
        await world.until(lambda s: len(world.runner.passes) == 2)
        waiting = world.prefill("waiting", 8, 20)
        await world.until(lambda s: s.queued == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        world.sender.streams["waiting"].end()
        await world.until(lambda s: s.queued == 0)
        world.sender.streams["first"].end()
        await first
        await world.idle()

    scenario(body, usable_pages=4)


def test_cancelled_while_its_stream_opens() -> None:
    async def body(world: World) -> None:
        world.sender.may_open.clear()
        call = world.prefill("r", 8)
        await world.sender.opened.wait()
        assert world.engine.status().queued == 1
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await world.idle()
        assert world.runner.passes == []

    scenario(body)


def test_an_unreachable_decode_worker_costs_no_compute() -> None:
    async def body(world: World) -> None:
        world.sender.error = PeerLost("r", "refused")
        with pytest.raises(PeerLost):
            await world.prefill("r", 8)
        await world.idle()
        assert world.runner.passes == []

    scenario(body)


def test_a_broken_stream_concerns_its_own_prompt_only() -> None:
    async def body(world: World) -> None:
        world.runner.gate.clear()
        broken, well = world.prefill("broken", 4), world.prefill("well", 4, 10)
        await asyncio.to_thread(world.runner.begun.wait)
        world.sender.streams["broken"].end(PeerLost("broken", "reset"))
        with pytest.raises(PeerLost, match="reset"):
            await broken
        world.runner.gate.set()
        await well
        await world.idle()

    scenario(body)


def test_a_model_error_fails_the_prompts_of_its_pass_and_the_loop_lives() -> None:
    async def body(world: World) -> None:
        world.runner.error = ZeroDivisionError("bad kernel")
        with pytest.raises(WorkerError, match="ZeroDivisionError: bad kernel"):
            await world.prefill("r", 8)
        await world.idle()
        world.runner.error = None
        outcome = await world.prefill("next", 8)
        assert outcome.cached_tokens == 0  # what a failed pass wrote is not reused

    scenario(body)


def test_a_lost_device_thread_ends_the_engine() -> None:
    async def run() -> None:
        world = World()
        world.device.close()
        engine = asyncio.create_task(world.engine.run())
        call = world.prefill("r", 4)
        with pytest.raises(ExceptionGroup) as caught:
            await engine
        assert caught.group_contains(RuntimeError)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(run())
