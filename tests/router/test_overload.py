"""More requests than the router serves at once, with fake workers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc

from router.testing import Session, answer, cluster, forever
from tandem.config.tree import TandemConfig
from tandem.pb import generate_pb2
from tandem.testing.calls import generate, greedy
from tandem.weights.store import ModelFolder

Code = grpc.StatusCode


async def stall_after_one_token(session: Session) -> None:
    await session.reserve()
    await session.arrival()
    await session.send(0, [65])
    await forever(session)


def test_requests_wait_in_a_bounded_queue(config: TandemConfig, folder: ModelFolder) -> None:
    config = replace(
        config, router=replace(config.router, max_running_requests=2, max_queued_requests=8)
    )

    async def main() -> None:
        async with cluster(config, folder) as running:
            decode, release = running.decode[0], asyncio.Event()

            async def script(session: Session) -> None:
                await release.wait()
                await answer([65])(session)

            decode.script = script
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(running.ask()) for _ in range(100)]
                await decode.until(lambda: len(decode.started) == 2)
                async with asyncio.timeout(20):
                    while sum(call.done() for call in calls) < 90:
                        await asyncio.wait(
                            [call for call in calls if not call.done()],
                            return_when=asyncio.FIRST_COMPLETED,
                        )
                status = await running.status()
                assert (status.requests_running, status.requests_queued) == (2, 8)
                release.set()
            codes = [call.result().code for call in calls]
            assert codes.count(Code.OK) == 10
            assert codes.count(Code.RESOURCE_EXHAUSTED) == 90
            refused = next(call.result() for call in calls if call.result().code is not Code.OK)
            assert "retry in" in refused.message
            status = await running.status()
            assert (status.requests_running, status.requests_queued) == (0, 0)

    asyncio.run(main())


def test_expired_and_cancelled_requests_leave_the_queue_unrun(
    config: TandemConfig, folder: ModelFolder
) -> None:
    config = replace(config, router=replace(config.router, max_running_requests=1))

    async def main() -> None:
        async with cluster(config, folder) as running:
            decode = running.decode[0]
            decode.script = stall_after_one_token
            first = running.stub.Generate(greedy("hello", max_tokens=3, request_id="first"))
            await anext(aiter(first))
            outcomes = await asyncio.gather(
                *(
                    generate(running.stub, greedy("hello", max_tokens=3), deadline_s=0.3)
                    for _ in range(20)
                )
            )
            assert {outcome.code for outcome in outcomes} == {Code.DEADLINE_EXCEEDED}
            async with asyncio.timeout(20):
                while (await running.status()).requests_queued:
                    pass
            decode.script = answer([65, 66])
            await running.stub.Abort(generate_pb2.AbortRequest(request_id="first"))
            assert (await running.ask()).code is Code.OK
            assert len(decode.started) == 2

    asyncio.run(main())
