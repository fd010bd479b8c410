"""Faults that users of other serving systems reported, tried on whole deployments.

Each name ends in the entry of docs/faults.md that it covers.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from tandem.pb import generate_pb2, generate_pb2_grpc
from tandem.testing.calls import OK, Outcome, generate, greedy, idle
from tandem.testing.cluster import ServedCluster, served_cluster
from tandem.testing.tiny import TINY_EOS_TOKEN_ID, write_tiny_llama

pytestmark = pytest.mark.ray

if TYPE_CHECKING:  # the asynchronous stub is a type only
    Stub = generate_pb2_grpc.TandemAsyncStub
WithStub = Callable[..., None]
LENGTH = generate_pb2.FINISH_REASON_LENGTH
LONG = [n % 251 for n in range(400)]
TRANSFER_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    """Two prefill workers that need a while, short time-outs, a decode pool for one long prompt."""
    folder = tmp_path_factory.mktemp("models") / "slower"
    write_tiny_llama(folder, num_layers=6, hidden=256, num_heads=8)
    settings = [
        f"model.name={folder}",
        "prefill.replicas=2",
        "prefill.chunk_tokens=32",
        "decode.num_pages=36",
        "cache.prefix_reuse=false",
        f"transfer.idle_timeout_s={TRANSFER_TIMEOUT_S}",
        "transfer.lease_s=20",
    ]
    with served_cluster(settings) as cluster:
        yield cluster


def on(cluster: ServedCluster, scenario: Callable[[Stub], object]) -> None:
    async def main() -> None:
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            done = scenario(generate_pb2_grpc.TandemStub(channel))
            assert asyncio.iscoroutine(done)
            await done

    asyncio.run(main())


async def workers(stub: Stub, role: str) -> list[generate_pb2.WorkerState]:
    status = await stub.GetStatus(generate_pb2.GetStatusRequest())
    return [worker for worker in status.workers if worker.role == role]


async def busy(stub: Stub, role: str) -> generate_pb2.WorkerState:
    """Wait until a worker of this role has a transfer under way."""
    while True:
        for worker in await workers(stub, role):
            if worker.transfers_pending:
                return worker
        await asyncio.sleep(0.005)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def alive(stub: Stub) -> None:
    outcome = await generate(stub, greedy("canary", max_tokens=8), deadline_s=20.0)
    assert outcome.code is OK, outcome.message
    assert len(outcome.token_ids) == 8


def test_a_stopped_decode_worker_fails_one_request_and_serves_again_xfr_01(
    impatient: ServedCluster,
) -> None:
    async def scenario(stub: Stub) -> None:
        before = [
            worker.pid for role in ("prefill", "decode") for worker in await workers(stub, role)
        ]
        victim = asyncio.create_task(generate(stub, greedy(LONG, max_tokens=8)))
        (decode,) = await workers(stub, "decode")
        await busy(stub, "prefill")
        with stopped(decode.pid):
            outcome = await victim
        assert outcome.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED), outcome
        assert outcome.message
        for number in range(10):
            after = await generate(stub, greedy(LONG[number:], max_tokens=8))
            assert after.code is OK, after.message
        await idle(stub)
        after_pids = [w.pid for role in ("prefill", "decode") for w in await workers(stub, role)]
        assert after_pids == before

    on(impatient, scenario)


def test_a_late_writer_cannot_touch_the_next_owner_of_its_pages_abt_01(
    impatient: ServedCluster,
) -> None:
    delays_s = random.Random(1)
    second = [(7 * n) % 253 for n in range(420)]

    async def scenario(stub: Stub) -> None:
        request = greedy(second, max_tokens=40, top_logprobs=2)
        solo = await generate(stub, request)
        assert solo.code is OK, solo.message
        for _ in range(6):
            first = asyncio.create_task(
                generate(stub, greedy(LONG, max_tokens=60), cancel_after_s=30.0)
            )
            writer = await busy(stub, "prefill")
            with stopped(writer.pid):
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                next_owner = asyncio.create_task(generate(stub, request))
                await asyncio.sleep(delays_s.uniform(0.0, 0.6))
            outcome = await next_owner
            assert outcome.code is OK, outcome.message
            assert not outcome.differs_from(solo)
        await idle(stub)

    on(impatient, scenario)


def test_the_status_of_an_ended_transfer_is_the_truth_abt_07(impatient: ServedCluster) -> None:
    async def scenario(stub: Stub) -> None:
        (decode,) = await workers(stub, "decode")
        late = asyncio.create_task(generate(stub, greedy(LONG, max_tokens=8), deadline_s=1.0))
        await busy(stub, "prefill")
        with stopped(decode.pid):
            outcome = await late
        assert outcome.code is grpc.StatusCode.DEADLINE_EXCEEDED, outcome
        assert outcome.finished is None
        named = asyncio.create_task(
            generate(stub, greedy(LONG, max_tokens=8, request_id="mid-transfer"))
        )
        await busy(stub, "prefill")
        assert (await stub.Abort(generate_pb2.AbortRequest(request_id="mid-transfer"))).found
        outcome = await named
        assert outcome.code is grpc.StatusCode.CANCELLED, outcome
        assert outcome.finished is None
        await idle(stub)
        await alive(stub)

    on(impatient, scenario)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_restarted_worker_is_a_new_peer_and_its_partner_lives_on_dth_01(
    with_stub: WithStub, role: str
) -> None:
    partner = {"prefill": "decode", "decode": "prefill"}[role]

    async def scenario(stub: Stub) -> None:
        await alive(stub)
        (victim,), (survivor,) = await workers(stub, role), await workers(stub, partner)
        os.kill(victim.pid, signal.SIGKILL)
        for prompt in ("a", "b", "c", "d", "e", LONG):
            outcome = await generate(stub, greedy(prompt, max_tokens=8))
            assert outcome.code is OK, outcome.message
        ((restarted,), (same,)) = await workers(stub, role), await workers(stub, partner)
        assert restarted.incarnation != victim.incarnation
        assert (same.pid, same.incarnation) == (survivor.pid, survivor.incarnation)
        await idle(stub)

    with_stub(scenario)


@pytest.mark.parametrize("tokens_read", [0, 1, 20])
def test_decode_s_death_ends_every_stream_by_name_dth_03(
    with_stub: WithStub, tokens_read: int
) -> None:
    async def scenario(stub: Stub) -> None:
        (decode,) = await workers(stub, "decode")
        calls = [
            asyncio.create_task(generate(stub, greedy(LONG[n:], max_tokens=100))) for n in range(3)
        ]
        watched = stub.Generate(greedy(LONG[5:], max_tokens=100))
        if not tokens_read:
            await busy(stub, "prefill")
        else:
            async for response in watched:
                if response.chunk.index >= tokens_read - 1:
                    break
        os.kill(decode.pid, signal.SIGKILL)
        async with asyncio.timeout(30):  # a hang guard
            outcomes = await asyncio.gather(*calls)
        for outcome in outcomes:  # OK only with all its tokens: `generate` counts them
            assert outcome.code in (OK, grpc.StatusCode.UNAVAILABLE), outcome
        watched.cancel()
        await alive(stub)
        await idle(stub)

    with_stub(scenario)


def test_cancels_at_any_moment_leave_nothing_behind_abt_04(with_stub: WithStub) -> None:
    moments = random.Random(4)

    async def scenario(stub: Stub) -> None:
        room = asyncio.Semaphore(24)

        async def one(number: int) -> Outcome:
            async with room:
                request = greedy(LONG[number % 100 :], max_tokens=60)
                return await generate(stub, request, cancel_after_s=moments.uniform(0.0, 0.3))

        outcomes = await asyncio.gather(*(one(number) for number in range(200)))
        assert {outcome.code for outcome in outcomes} <= {OK, grpc.StatusCode.CANCELLED}
        await idle(stub)
        await alive(stub)

    with_stub(scenario)


MANY = """
import asyncio, sys, grpc
from tandem.pb import generate_pb2_grpc
from tandem.testing.calls import generate, greedy

async def main():
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        stub = generate_pb2_grpc.TandemStub(channel)
        calls = [
            asyncio.ensure_future(
                generate(stub, greedy([(n * k) % 256 for k in range(400)], max_tokens=100))
            )
            for n in range(30)
        ]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        print("one is done", flush=True)
        await asyncio.gather(*calls)

asyncio.run(main())
"""


def test_a_killed_client_of_many_long_prompts_wedges_nothing_abt_08(
    tiny_cluster: ServedCluster, with_stub: WithStub
) -> None:
    async def scenario(stub: Stub) -> None:
        for _ in range(2):
            client = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                MANY,
                tiny_cluster.address,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            )
            assert client.stdout is not None
            await client.stdout.readline()
            client.kill()
            await client.wait()
            await idle(stub, within_s=15.0)
            await alive(stub)

    with_stub(scenario)


def test_late_repeated_and_unknown_aborts_disturb_nobody_abt_10(with_stub: WithStub) -> None:
    async def scenario(stub: Stub) -> None:
        expected = await generate(stub, greedy("hello", max_tokens=4))
        for number in range(20):
            name = f"abt-10-{number}"
            call = stub.Generate(greedy("hello", max_tokens=4, request_id=name))
            async for response in call:
                if response.WhichOneof("event") == "finished":
                    call.cancel()
                    call.cancel()
                    break
            for unknown in (name, f"never-{number}", name):
                answer = await stub.Abort(generate_pb2.AbortRequest(request_id=unknown))
                assert not answer.found or unknown == name
        await idle(stub)
        for number in range(20):
            request = greedy("hello", max_tokens=4, request_id=f"abt-10-{number}")
            outcome = await generate(stub, request)
            assert outcome.code is OK, outcome.message
            assert outcome.token_ids == expected.token_ids

    with_stub(scenario)


def test_requests_that_fill_the_decode_pool_together_all_finish_xfr_04(
    impatient: ServedCluster,
) -> None:
    requests = [
        greedy([(n * k) % 256 for k in range(64)], max_tokens=100, top_logprobs=2)
        for n in range(1, 7)
    ]

    async def scenario(stub: Stub) -> None:
        solo = [await generate(stub, request) for request in requests]
        together = await asyncio.gather(*(generate(stub, request) for request in requests))
        for ours, alone in zip(together, solo, strict=True):
            assert ours.code is OK, ours.message
            assert len(ours.token_ids) == 100
            assert not ours.differs_from(alone)
        await idle(stub)

    on(impatient, scenario)


def test_a_first_token_that_ends_the_answer_is_the_last_hnd_01(with_stub: WithStub) -> None:
    async def scenario(stub: Stub) -> None:
        request = greedy("hello", max_tokens=8, ignore_eos=False)
        request.sampling.logit_bias[TINY_EOS_TOKEN_ID] = 100.0
        outcome = await generate(stub, request)
        assert outcome.code is OK, outcome.message
        assert (outcome.token_ids, outcome.text) == ([TINY_EOS_TOKEN_ID], "")
        assert outcome.finished is not None
        assert outcome.finished.finish_reason == generate_pb2.FINISH_REASON_STOP
        await idle(stub)

    with_stub(scenario)


@pytest.mark.parametrize("top_logprobs", [0, 2])
def test_the_budget_counts_the_handed_over_token_hnd_02(
    with_stub: WithStub, top_logprobs: int
) -> None:
    async def scenario(stub: Stub) -> None:
        for max_tokens in (1, 2, 3):
            request = greedy("hello", max_tokens=max_tokens, top_logprobs=top_logprobs)
            outcome = await generate(stub, request)
            assert outcome.code is OK, outcome.message
            assert len(outcome.token_ids) == max_tokens
            assert len(outcome.logprobs) == (max_tokens if top_logprobs else 0)
            assert outcome.finished is not None
            assert outcome.finished.finish_reason == LENGTH
        none = await generate(stub, greedy("hello", max_tokens=0))
        assert none.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "max_tokens" in none.message
        await idle(stub)

    with_stub(scenario)


def test_usage_counts_reused_tokens_once_hnd_07(with_stub: WithStub) -> None:
    fresh = [(11 * n + 3) % 239 for n in range(70)]  # four pages and a bit

    async def scenario(stub: Stub) -> None:
        first = await generate(stub, greedy(fresh, max_tokens=4))
        again = await generate(stub, greedy(fresh, max_tokens=4))
        assert first.usage.cached_tokens == 0
        assert again.usage.cached_tokens == 64  # whole pages, as one worker would say
        assert again.token_ids == first.token_ids
        assert again.usage.prompt_tokens == first.usage.prompt_tokens == 70
        assert again.usage.completion_tokens == 4

    with_stub(scenario)


def test_prompts_of_every_length_around_a_page_are_served_and_released_xfr_07(
    with_stub: WithStub,
) -> None:
    async def scenario(stub: Stub) -> None:
        for length in (1, 2, 15, 16, 17, 31, 32, 33):
            outcomes = [await generate(stub, greedy(LONG[:length], max_tokens=6)) for _ in range(2)]
            assert [outcome.code for outcome in outcomes] == [OK, OK]
            assert outcomes[0].token_ids == outcomes[1].token_ids
            await idle(stub)

    with_stub(scenario)
