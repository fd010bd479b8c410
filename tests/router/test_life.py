"""One request from its acceptance to its one terminal status, with fake workers."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from router.testing import Cluster, Session, answer, cluster, forever
from tandem.config.tree import TandemConfig
from tandem.errors import Overloaded, PeerLost, TransferTimeout, WorkerError
from tandem.pb import generate_pb2, worker_pb2
from tandem.testing.calls import Outcome, generate, greedy
from tandem.weights.store import ModelFolder

Code = grpc.StatusCode


async def ask(running: Cluster, prompt: str = "hello", **settings: object) -> Outcome:
    request = greedy(prompt, max_tokens=3, **settings)  # type: ignore[arg-type]
    request.stopping.ClearField("max_tokens")
    return await generate(running.stub, request, deadline_s=30)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other leg's news is waited for however slow the machine."""
    monkeypatch.setattr("router.legs._ROOT_CAUSE_S", 20.0)


def test_a_request_brings_its_tokens_usage_and_timings(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            outcome = await ask(running)
            assert outcome.code is Code.OK, outcome
            assert (outcome.token_ids, outcome.text) == ([65, 66, 67], "ABC")
            finished = outcome.finished
            assert finished is not None
            assert finished.finish_reason == generate_pb2.FINISH_REASON_STOP
            assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (5, 3)
            assert finished.usage.cached_tokens == 1
            timings = finished.timings
            assert (timings.prefill_queue_ms, timings.prefill_ms, timings.transfer_ms) == (2, 3, 4)
            assert 0 < timings.queue_ms <= timings.first_token_ms <= timings.total_ms
            (work,) = running.decode[0].started
            assert list(work.token_ids) == list(b"hello")
            assert running.prefill[0].started == [work]

    asyncio.run(main())


def test_each_token_is_delivered_once_and_in_order(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def script(session: Session) -> None:
        await session.reserve()
        await session.arrival()
        await session.send(0, [65])
        await session.send(0, [65])
        await session.send(1, [66, 67])
        await session.send(1, [66])
        await session.send(3, [68], generate_pb2.FINISH_REASON_LENGTH)

    async def main() -> None:
        async with cluster(config, folder) as running:
            running.decode[0].script = script
            outcome = await ask(running)
            assert (outcome.code, outcome.text) == (Code.OK, "ABCD"), outcome

    asyncio.run(main())


def test_a_gap_in_the_stream_is_an_error_that_names_the_worker(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def script(session: Session) -> None:
        await session.reserve()
        await session.arrival()
        await session.send(0, [65])
        await session.send(2, [67], generate_pb2.FINISH_REASON_STOP)

    async def main() -> None:
        async with cluster(config, folder) as running:
            running.decode[0].script = script
            outcome = await ask(running)
            assert outcome.code is Code.INTERNAL
            assert "decode-0" in outcome.message
            assert "token 1 was due" in outcome.message
            assert outcome.token_ids == [65]

    asyncio.run(main())


def test_a_stream_without_a_finish_reason_is_an_error(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def script(session: Session) -> None:
        await session.reserve()
        await session.arrival()
        await session.send(0, [65])

    async def main() -> None:
        async with cluster(config, folder) as running:
            running.decode[0].script = script
            outcome = await ask(running)
            assert outcome.code is Code.INTERNAL
            assert "without a finish reason" in outcome.message

    asyncio.run(main())


async def stall_after_one_token(session: Session) -> None:
    await session.reserve()
    await session.arrival()
    await session.send(0, [65])
    await forever(session)


def test_cancel_reaches_both_workers(config: TandemConfig, folder: ModelFolder) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            prefill, decode = running.prefill[0], running.decode[0]
            prefill.script = forever
            call = running.stub.Generate(greedy("hello", max_tokens=3, request_id="mine"))
            await prefill.until(lambda: bool(prefill.started))
            call.cancel()
            await prefill.until(lambda: prefill.cancelled == ["mine"])
            await decode.until(lambda: decode.cancelled == ["mine"])
            await gone(running)

    asyncio.run(main())


async def gone(running: Cluster) -> None:
    """Wait until the router holds no request; each status call gives it a turn."""
    async with asyncio.timeout(20):
        while (await running.status()).requests_running:
            pass


def test_cancel_between_tokens_reaches_decode(config: TandemConfig, folder: ModelFolder) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            decode = running.decode[0]
            decode.script = stall_after_one_token
            call = running.stub.Generate(greedy("hello", max_tokens=3))
            assert (await anext(aiter(call))).chunk.token_ids == [65]
            call.cancel()
            await decode.until(lambda: len(decode.cancelled) == 1)
            await gone(running)

    asyncio.run(main())


def test_the_deadline_is_passed_on_and_ends_everything(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            prefill, decode = running.prefill[0], running.decode[0]
            prefill.script = forever
            outcome = await generate(
                running.stub, greedy("hello", max_tokens=3, request_id="mine"), deadline_s=2.0
            )
            assert outcome.code is Code.DEADLINE_EXCEEDED
            await prefill.until(lambda: prefill.cancelled == ["mine"])
            await decode.until(lambda: decode.cancelled == ["mine"])
            for worker in (prefill, decode):
                assert worker.deadlines[0] is not None
                assert 0 < worker.deadlines[0] < 3.0  # gRPC rounds up on the wire
            await gone(running)

    asyncio.run(main())


def test_no_deadline_stays_none(config: TandemConfig, folder: ModelFolder) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            call = running.stub.Generate(greedy("hello", max_tokens=3))
            assert [response async for response in call][-1].finished.usage.completion_tokens == 3
            assert running.prefill[0].deadlines == running.decode[0].deadlines == [None]

    asyncio.run(main())


def test_an_error_of_prefill_is_the_request_s_and_cancels_decode(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def refuse(_request: worker_pb2.PrefillRequest) -> None:
        raise Overloaded("the prefill worker's queue is full", 3.0)

    async def main() -> None:
        async with cluster(config, folder) as running:
            running.prefill[0].script = refuse
            call = running.stub.Generate(greedy("hello", max_tokens=3, request_id="mine"))
            assert await call.code() is Code.RESOURCE_EXHAUSTED
            assert dict(await call.trailing_metadata())["retry-after-s"] == "3"
            decode = running.decode[0]
            await decode.until(lambda: decode.cancelled == ["mine"])

    asyncio.run(main())


def test_an_error_of_decode_is_the_request_s_and_cancels_prefill(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            prefill = running.prefill[0]
            prefill.script = forever

            async def fail(session: Session) -> None:
                await session.reserve()
                await prefill.until(lambda: bool(prefill.started))
                raise WorkerError("decode-0", "the device is broken")

            running.decode[0].script = fail
            outcome = await ask(running, request_id="mine")
            assert outcome.code is Code.INTERNAL
            assert outcome.message == "worker decode-0: the device is broken"
            await prefill.until(lambda: prefill.cancelled == ["mine"])

    asyncio.run(main())


def test_the_cause_is_told_when_the_echo_comes_first(
    config: TandemConfig, folder: ModelFolder, patient: None
) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            prefill, decode = running.prefill[0], running.decode[0]
            failed = asyncio.Event()

            async def echo(session: Session) -> None:
                await session.reserve()
                await prefill.until(lambda: bool(prefill.started))
                failed.set()
                raise PeerLost(session.request.request_id, "prefill is gone")

            async def break_down(_request: worker_pb2.PrefillRequest) -> None:
                await failed.wait()
                raise WorkerError("prefill-0", "out of memory")

            prefill.script, decode.script = break_down, echo
            outcome = await ask(running)
            assert outcome.message == "worker prefill-0: out of memory"

    asyncio.run(main())


def test_the_cause_is_told_when_prefill_brings_the_echo(
    config: TandemConfig, folder: ModelFolder, patient: None
) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            failed = asyncio.Event()

            async def echo(request: worker_pb2.PrefillRequest) -> None:
                failed.set()
                raise PeerLost(request.request.request_id, "decode is gone")

            async def break_down(session: Session) -> None:
                await session.reserve()
                await failed.wait()
                raise WorkerError("decode-0", "out of memory")

            running.prefill[0].script, running.decode[0].script = echo, break_down
            outcome = await ask(running)
            assert outcome.message == "worker decode-0: out of memory"

    asyncio.run(main())


def test_a_transfer_error_alone_ends_the_request(config: TandemConfig, folder: ModelFolder) -> None:
    async def time_out(request: worker_pb2.PrefillRequest) -> None:
        raise TransferTimeout(request.request.request_id, "nothing came for 30 s")

    async def main() -> None:
        async with cluster(config, folder) as running:
            running.prefill[0].script = time_out
            outcome = await ask(running)
            assert outcome.code is Code.UNAVAILABLE
            assert "nothing came for 30 s" in outcome.message

    asyncio.run(main())


def test_prefill_s_failure_after_the_first_token_changes_nothing(
    config: TandemConfig, folder: ModelFolder, patient: None
) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            handed_over, go_on = asyncio.Event(), asyncio.Event()

            async def fail_late(_request: worker_pb2.PrefillRequest) -> None:
                handed_over.set()
                await go_on.wait()
                raise WorkerError("prefill-0", "tripped on the way out")

            async def script(session: Session) -> None:
                await session.reserve()
                await handed_over.wait()
                await session.send(0, [65])
                go_on.set()
                await session.send(1, [66], generate_pb2.FINISH_REASON_STOP)

            running.prefill[0].script, running.decode[0].script = fail_late, script
            outcome = await ask(running)
            assert (outcome.code, outcome.text) == (Code.OK, "AB"), outcome

    asyncio.run(main())


def test_abort_ends_the_stream_as_cancelled(config: TandemConfig, folder: ModelFolder) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            decode = running.decode[0]
            decode.script = stall_after_one_token
            request = generate_pb2.AbortRequest(request_id="mine")
            assert not (await running.stub.Abort(request)).found
            call = running.stub.Generate(greedy("hello", max_tokens=3, request_id="mine"))
            assert (await anext(aiter(call))).chunk.token_ids == [65]
            assert (await running.stub.Abort(request)).found
            assert await call.code() is Code.CANCELLED
            assert await call.details() == "request mine: it was aborted"
            await decode.until(lambda: decode.cancelled == ["mine"])
            assert not (await running.stub.Abort(request)).found

    asyncio.run(main())


def test_an_id_is_taken_while_its_request_runs_and_free_right_after(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            decode = running.decode[0]
            decode.script = stall_after_one_token
            call = running.stub.Generate(greedy("hello", max_tokens=3, request_id="mine"))
            await anext(aiter(call))
            outcome = await ask(running, request_id="mine")
            assert outcome.code is Code.INVALID_ARGUMENT
            assert outcome.message.startswith("request_id: 'mine'")
            await running.stub.Abort(generate_pb2.AbortRequest(request_id="mine"))
            assert await call.code() is Code.CANCELLED
            decode.script = answer([65, 66])
            for _ in range(5):
                assert (await ask(running, request_id="mine")).code is Code.OK
            outcomes = await asyncio.gather(*(ask(running, request_id="") for _ in range(20)))
            assert {outcome.code for outcome in outcomes} == {Code.OK}
            assert len({work.room for work in decode.started}) == len(decode.started)

    asyncio.run(main())


def test_requests_are_spread_and_load_counts_until_the_stream_ends(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def main() -> None:
        async with cluster(config, folder, num_prefill=2, num_decode=2) as running:
            for decode in running.decode:
                decode.script = stall_after_one_token
            calls = []
            for _ in range(10):
                call = running.stub.Generate(greedy("hello", max_tokens=3))
                await anext(aiter(call))
                calls.append(call)
            workers = [*running.prefill, *running.decode]
            assert [len(worker.started) for worker in workers] == [5, 5, 5, 5]
            first = running.decode[0]
            ids = {work.request_id for work in first.started}
            for request_id in ids:
                await running.stub.Abort(generate_pb2.AbortRequest(request_id=request_id))
            await first.until(lambda: len(first.cancelled) == 5)
            for _ in range(5):
                await anext(aiter(running.stub.Generate(greedy("hello", max_tokens=3))))
            assert len(first.started) == 10

    asyncio.run(main())
