from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import Tensor

from decode_worker.engine import Runner as DecodeRunnerLike
from decode_worker.worker import DecodeWorker
from kv_transfer.receiver import KVReceiver
from kv_transfer.reservation import Reservation
from prefill_worker.engine import Runner as PrefillRunnerLike
from prefill_worker.worker import PrefillWorker
from tandem.cache.pool import KVPool
from tandem.config.tree import TandemConfig
from tandem.errors import WorkerError, WorkerLost
from tandem.models.model import DecodeRow, Model, PrefillSequence
from tandem.pb import worker_pb2, worker_pb2_grpc
from tandem.requests import GenerateRequest, OutputChunk
from tandem.testing.pair import Completion, Pair
from tandem.testing.reference import new_request, random_prompt
from tandem.wireforms import request_to_wire
from tandem.workers import WorkerIdentity

Configure = Callable[..., TandemConfig]
Expected = Callable[[GenerateRequest], Completion]
Running = Callable[..., AbstractAsyncContextManager[tuple[Pair, asyncio.Event]]]
WithPair = Callable[..., None]


class Gate:
    """Holds a device thread back until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.open.wait(60)


def gated_prefill(gate: Gate, at_layer: int) -> type[PrefillWorker]:
    """A prefill worker that stops before it reports layer ``at_layer``."""

    class GatedRunner:
        def __init__(self, runner: PrefillRunnerLike) -> None:
            self._runner = runner

        def run(
            self, sequences: Sequence[PrefillSequence], on_layer: Callable[[int], None]
        ) -> Tensor:
            def gated(layer: int) -> None:
                if layer == at_layer:
                    gate.pass_through()
                on_layer(layer)

            return self._runner.run(sequences, gated)

    class GatedWorker(PrefillWorker):
        def make_runner(self, model: Model, pool: KVPool) -> PrefillRunnerLike:
            return GatedRunner(super().make_runner(model, pool))

    return GatedWorker


def test_a_layer_is_there_before_the_next_one_is_computed(
    with_pair: WithPair, config: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    reserved: list[Reservation] = []
    reserve = KVReceiver.reserve

    def watched(self: KVReceiver, *args: Any, **kwargs: Any) -> Reservation:
        reserved.append(reserve(self, *args, **kwargs))
        return reserved[-1]

    monkeypatch.setattr(KVReceiver, "reserve", watched)

    async def body(pair: Pair) -> None:
        call = asyncio.create_task(pair.generate(new_request(random_prompt(40))))
        await asyncio.to_thread(gate.reached.wait)  # layer 1 has not ended ...
        await reserved[0].wait_layer(0)  # ... and all of layer 0 has arrived
        assert not gate.open.is_set()
        gate.open.set()
        assert len((await call).token_ids) == 8

    with_pair(config(), body, prefill=gated_prefill(gate, at_layer=1))


def gated_decode(gate: Gate, error: list[Exception]) -> type[DecodeWorker]:
    """A decode worker whose steps pass the gate first, and fail with the error if there is one."""

    class GatedRunner:
        def __init__(self, runner: DecodeRunnerLike) -> None:
            self._runner = runner

        @property
        def graph_summary(self) -> str:
            return self._runner.graph_summary

        def step(self, rows: Sequence[DecodeRow]) -> Tensor:
            gate.pass_through()
            if error:
                raise error.pop()
            return self._runner.step(rows)

    class GatedWorker(DecodeWorker):
        def make_runner(self, model: Model, pool: KVPool) -> DecodeRunnerLike:
            return GatedRunner(super().make_runner(model, pool))

    return GatedWorker


async def cancelled(call: asyncio.Task[Any]) -> None:
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def test_cancelled_while_prefill_computes(with_pair: WithPair, config: Configure) -> None:
    gate = Gate()

    async def body(pair: Pair) -> None:
        call = asyncio.create_task(pair.generate(new_request(random_prompt(200))))
        await asyncio.to_thread(gate.reached.wait)
        queued = asyncio.create_task(pair.generate(new_request(random_prompt(30))))
        await pair.until(lambda prefill, decode: prefill.queued == 1)
        await cancelled(queued)
        await cancelled(call)
        gate.open.set()
        await pair.idle()
        assert len((await pair.generate(new_request(random_prompt(30)))).token_ids) == 8

    with_pair(config(), body, prefill=gated_prefill(gate, at_layer=1))


def test_cancelled_while_decode_runs(with_pair: WithPair, config: Configure) -> None:
    gate = Gate()

    async def body(pair: Pair) -> None:
        call = asyncio.create_task(pair.generate(new_request(random_prompt(20))))
        await asyncio.to_thread(gate.reached.wait)
        await cancelled(call)
        gate.open.set()
        await pair.idle()

    with_pair(config(), body, decode=gated_decode(gate, []))


def test_cancelled_in_decodes_queue_and_while_reserved(
    with_pair: WithPair, config: Configure
) -> None:
    async def body(pair: Pair) -> None:
        ask = worker_pb2.DecodeRequest(request=request_to_wire(new_request(random_prompt(20), 12)))
        reserved = pair.decode.Decode(ask, metadata=pair.metadata)
        event = await reserved.read()
        assert isinstance(event, worker_pb2.DecodeEvent)
        assert event.HasField("reserved")
        waiting = asyncio.create_task(pair.generate(new_request(random_prompt(20), 12)))
        await pair.until(lambda prefill, decode: decode.queued == 1)
        _, state = await pair.states()
        assert (state.running, state.transfers_pending, state.pages_used) == (1, 1, 2)
        await cancelled(waiting)
        await pair.until(lambda prefill, decode: decode.queued == 0)
        reserved.cancel()
        await pair.idle()

    with_pair(config(decode={"num_pages": 3}), body)


def test_random_cancels_leave_nothing_behind_and_disturb_nobody(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    draw = random.Random(9)

    async def maybe_cancelled(pair: Pair, work: GenerateRequest, after: int | None) -> list[int]:
        seen = asyncio.Event()

        def count(chunk: OutputChunk) -> None:
            if after is not None and chunk.index >= after:
                seen.set()

        call = asyncio.create_task(pair.generate(work, count))
        if after is None:
            return (await call).token_ids
        if after >= 0:
            await seen.wait()
        else:
            await asyncio.sleep(draw.random() * 0.05)
        call.cancel()
        await asyncio.wait([call])
        return []

    async def body(pair: Pair) -> None:
        works = [new_request(random_prompt(draw.randrange(1, 70), n), 10) for n in range(45)]
        moments = [draw.choice([-1, -1, 0, 3]) if n % 3 == 0 else None for n in range(45)]
        outputs = await asyncio.gather(
            *(maybe_cancelled(pair, work, at) for work, at in zip(works, moments, strict=True))
        )
        await pair.idle()
        for work, moment, output in zip(works, moments, outputs, strict=True):
            if moment is None:
                assert output == expected(work).token_ids

    with_pair(config(prefill={"num_pages": 12}, decode={"num_pages": 24}), body)


def test_deadlines_free_everything(with_pair: WithPair, config: Configure) -> None:
    gate = Gate()

    async def body(pair: Pair) -> None:
        ask = worker_pb2.DecodeRequest(request=request_to_wire(new_request(random_prompt(20))))
        call = pair.decode.Decode(ask, metadata=pair.metadata, timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    with_pair(config(), body, decode=gated_decode(gate, []))


def test_a_failed_step_ends_its_requests_and_the_worker_lives(
    with_pair: WithPair, config: Configure
) -> None:
    gate, errors = Gate(), [ZeroDivisionError("bad kernel")]
    gate.open.set()

    async def body(pair: Pair) -> None:
        with pytest.raises(WorkerError, match="bad kernel") as caught:
            await pair.generate(new_request(random_prompt(20)))
        assert caught.value.worker_id == "decode-0"
        await pair.idle()
        assert len((await pair.generate(new_request(random_prompt(20)))).token_ids) == 8

    with_pair(config(), body, decode=gated_decode(gate, list(errors)))


def test_a_draining_worker_finishes_what_runs_and_refuses_the_rest(
    running: Running, config: Configure
) -> None:
    gate = Gate()

    async def scenario() -> None:
        worker = gated_decode(gate, [])
        async with running(config(), decode=worker) as (pair, stopping):
            call = asyncio.create_task(pair.generate(new_request(random_prompt(20))))
            await asyncio.to_thread(gate.reached.wait)
            address = (await pair.states())[1].address
            stopping.set()
            await pair.decode_drains()
            async with grpc.aio.insecure_channel(address) as channel:
                health: health_pb2_grpc.HealthAsyncStub = health_pb2_grpc.HealthStub(channel)
                reply = await health.Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(WorkerLost, match="draining"):
                await pair.generate(new_request(random_prompt(20)))
            gate.open.set()
            assert len((await call).token_ids) == 8

    asyncio.run(scenario())


def test_what_outlives_the_drain_ends_with_a_clear_status(
    running: Running, config: Configure
) -> None:
    async def scenario() -> None:
        settings = config(workers={"drain_timeout_s": 0.05}, decode={"num_pages": 1})
        async with running(settings) as (pair, stopping):
            ask = worker_pb2.DecodeRequest(
                request=request_to_wire(new_request(random_prompt(8), 4))
            )
            reserved = pair.decode.Decode(ask, metadata=pair.metadata)
            await reserved.read()
            waiting = asyncio.create_task(pair.generate(new_request(random_prompt(8), 4)))
            await pair.until(lambda prefill, decode: decode.queued == 1)
            stopping.set()
            with pytest.raises(WorkerLost, match=r"stopped; .* longer than 0\.05 s"):
                await waiting
            assert await reserved.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(scenario())


def test_workers_join_the_registry_and_leave_it_last(running: Running, config: Configure) -> None:
    heard: list[tuple[str, str]] = []
    layouts: set[str] = set()

    class Registry(worker_pb2_grpc.RegistryServicer):
        async def Join(  # noqa: N802 - the name in the proto
            self, request_iterator: AsyncIterator[worker_pb2.WorkerReport], context: Any
        ) -> AsyncIterator[worker_pb2.JoinReply]:
            async for report in request_iterator:
                if report.HasField("info"):
                    layouts.add(WorkerIdentity.from_wire(report.info).layout_digest)
                    yield worker_pb2.JoinReply(heartbeat_interval_s=3600)
                heard.append((report.status.worker_id, report.status.state))
            heard.append(("", "left"))

    async def scenario() -> None:
        server = grpc.aio.server()
        worker_pb2_grpc.add_RegistryServicer_to_server(Registry(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        gate = Gate()
        async with running(
            config(), decode=gated_decode(gate, []), registry_address=f"127.0.0.1:{port}"
        ) as (pair, stopping):
            call = asyncio.create_task(pair.generate(new_request(random_prompt(20))))
            await asyncio.to_thread(gate.reached.wait)
            while len({worker_id for worker_id, _ in heard}) < 2:  # noqa: ASYNC110 - the registry is the test's own
                await asyncio.sleep(0.01)
            stopping.set()
            await pair.decode_drains()
            gate.open.set()
            await call
        await server.stop(5)

    asyncio.run(scenario())
    assert {("decode-0", "ready"), ("prefill-0", "ready"), ("decode-0", "draining")} <= set(heard)
    assert len(layouts) == 1
