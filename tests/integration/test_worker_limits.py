from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from torch import Tensor

from decode_worker.engine import Runner as DecodeRunnerLike
from decode_worker.worker import DecodeWorker
from tandem.cache.pool import KVPool
from tandem.config.tree import TandemConfig
from tandem.errors import LayoutMismatch, Overloaded, RequestTooLong
from tandem.models.model import DecodeRow, Model
from tandem.pb import worker_pb2, worker_pb2_grpc
from tandem.requests import GenerateRequest, SamplingParams
from tandem.testing.pair import Completion, Pair
from tandem.testing.reference import new_request, random_prompt
from tandem.wireforms import chunk_from_wire, request_to_wire

Configure = Callable[..., TandemConfig]
Expected = Callable[[GenerateRequest], Completion]
WithPair = Callable[..., None]


@asynccontextmanager
async def slow_channel(pair: Pair) -> AsyncIterator[worker_pb2_grpc.DecodeWorkerAsyncStub]:
    """The decode worker, over a connection that holds a few chunks at most."""
    small_window = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    _, state = await pair.states()
    async with grpc.aio.insecure_channel(state.address, options=small_window) as channel:
        yield worker_pb2_grpc.DecodeWorkerStub(channel)


def test_what_can_never_fit_is_refused_by_either_worker(
    with_pair: WithPair, config: Configure
) -> None:
    async def body(pair: Pair) -> None:
        with pytest.raises(RequestTooLong, match="prefill worker has 4"):
            await pair.generate(new_request(random_prompt(80)))
        with pytest.raises(RequestTooLong, match="decode worker has 8"):
            await pair.generate(new_request(random_prompt(20), max_tokens=200))
        assert len((await pair.generate(new_request(random_prompt(20)))).token_ids) == 8

    with_pair(config(prefill={"num_pages": 4}, decode={"num_pages": 8}), body)


def test_full_queues_refuse_with_a_delay_and_everything_ends(
    with_pair: WithPair, config: Configure
) -> None:
    async def body(pair: Pair) -> None:
        settled = await asyncio.gather(
            *(pair.generate(new_request(random_prompt(20, n))) for n in range(12)),
            return_exceptions=True,
        )
        refused = [outcome for outcome in settled if isinstance(outcome, Overloaded)]
        served = [outcome for outcome in settled if not isinstance(outcome, BaseException)]
        assert len(refused) + len(served) == 12
        assert refused
        assert served
        assert all(error.retry_after_s > 0 for error in refused)

    small = config(decode={"max_running_requests": 2, "max_queued_requests": 3})
    with_pair(small, body)


def test_a_reader_that_stops_pauses_its_own_request_only(
    with_pair: WithPair, config: Configure, expected: Expected
) -> None:
    steps: list[int] = []

    class CountingRunner:
        def __init__(self, runner: DecodeRunnerLike) -> None:
            self._runner = runner

        @property
        def graph_summary(self) -> str:
            return self._runner.graph_summary

        def step(self, rows: Sequence[DecodeRow]) -> Tensor:
            steps.append(len(rows))
            return self._runner.step(rows)

    class CountingWorker(DecodeWorker):
        def make_runner(self, model: Model, pool: KVPool) -> DecodeRunnerLike:
            return CountingRunner(super().make_runner(model, pool))

    async def body(pair: Pair) -> None:
        sampling = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=20)
        work = new_request(random_prompt(20), 490, sampling)
        done = Completion()
        async with slow_channel(pair) as decode:
            call = decode.Decode(
                worker_pb2.DecodeRequest(request=request_to_wire(work)), metadata=pair.metadata
            )
            events = aiter(call)
            target = (await anext(events)).reserved.target
            await pair.prefill.Prefill(
                worker_pb2.PrefillRequest(request=request_to_wire(work), target=target),
                metadata=pair.metadata,
            )
            before = -1
            while before < len(steps):  # until the stream's window and the outbox are full
                before = len(steps)
                await asyncio.sleep(0.2)
            assert before < 489
            assert len((await pair.generate(new_request(random_prompt(9)))).token_ids) == 8
            async for event in events:
                done.chunks.append(chunk_from_wire(event.chunk))
        assert done.token_ids == expected(work).token_ids

    settings = config(decode={"max_unread_chunks": 4})
    with_pair(settings, body, decode=CountingWorker)


def test_workers_that_keep_caches_differently_refuse_each_other(
    with_pair: WithPair, config: Configure
) -> None:
    async def body(pair: Pair) -> None:
        with pytest.raises(LayoutMismatch) as caught:
            await pair.generate(new_request(random_prompt(20)))
        assert "page_tokens" in caught.value.field

    other = config(cache={"page_tokens": 24}, prefill={"chunk_tokens": 72})
    with_pair(config(), body, decode_settings=other)


def test_a_reader_that_leaves_while_it_is_written_to_frees_everything(
    with_pair: WithPair, config: Configure
) -> None:
    async def body(pair: Pair) -> None:
        work = new_request(random_prompt(20), 490)
        async with slow_channel(pair) as decode:
            call = decode.Decode(
                worker_pb2.DecodeRequest(request=request_to_wire(work)), metadata=pair.metadata
            )
            events = aiter(call)
            target = (await anext(events)).reserved.target
            await pair.prefill.Prefill(
                worker_pb2.PrefillRequest(request=request_to_wire(work), target=target),
                metadata=pair.metadata,
            )
            await anext(events)
            call.cancel()

    with_pair(config(decode={"max_unread_chunks": 1}), body)
