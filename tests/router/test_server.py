"""The router's servers: health, reflection, status, ports, limits, who may join, the drain."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.server import SERVICE, RouterServer
from router.testing import SECRET, FakeDecode, FakePrefill, Session, cluster, forever
from tandem.config.tree import TandemConfig
from tandem.errors import ConfigError
from tandem.pb import generate_pb2, worker_pb2, worker_pb2_grpc
from tandem.testing.calls import generate, greedy
from tandem.weights.store import ModelFolder
from tandem.workers import WorkerStatus

Code = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_the_router_runs_without_torch() -> None:
    code = "import sys, router.server; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("service", [SERVICE, ""])
def test_health_is_serving_while_a_pair_of_workers_is_ready(
    config: TandemConfig, folder: ModelFolder, service: str
) -> None:
    async def main() -> None:
        async with cluster(config, folder, num_prefill=0, num_decode=0) as running:
            health = running.health(service)
            assert await anext(health) == NOT_SERVING
            prefill = await running.add(FakePrefill("prefill-0", folder))
            decode = await running.add(FakeDecode("decode-0", folder))
            assert await anext(health) == SERVING
            decode.status = WorkerStatus(state="draining")
            decode.membership.report_now()
            assert await anext(health) == NOT_SERVING
            decode.status = WorkerStatus()
            decode.membership.report_now()
            assert await anext(health) == SERVING
            await prefill.die()
            assert await anext(health) == NOT_SERVING

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"layout_digest": "other"}, "K/V layout"),
        ({"page_tokens": 24}, "page_tokens"),
    ],
)
def test_workers_that_do_not_fit_together_are_never_used_and_say_why(
    config: TandemConfig, folder: ModelFolder, change: dict[str, Any], problem: str
) -> None:
    router = dataclasses.replace(config.router, worker_wait_s=0.2)
    config = dataclasses.replace(config, router=router)

    async def main() -> None:
        async with cluster(config, folder, num_decode=0) as running:
            decode = FakeDecode("decode-0", folder)
            decode.identity = dataclasses.replace(decode.identity, **change)
            await running.add(decode)
            status = await running.status()
            assert all(problem in worker.problem for worker in status.workers), status
            outcome = await running.ask()
            assert outcome.code is Code.UNAVAILABLE
            assert problem in outcome.message
            assert not decode.started
            health = running.health()
            assert await anext(health) == NOT_SERVING
            await running.add(FakeDecode("decode-1", folder))
            assert await anext(health) == SERVING
            assert (await running.ask()).code is Code.OK
            assert not decode.started

    asyncio.run(main())


def test_workers_with_other_weights_than_the_router_s_are_never_used(
    config: TandemConfig, folder: ModelFolder
) -> None:
    other = dataclasses.replace(folder, weights_digest="something else")

    async def main() -> None:
        async with cluster(config, folder, num_decode=0) as running:
            await running.add(FakeDecode("decode-0", other))
            await running.add(FakeDecode("decode-1", folder))
            assert (await running.ask()).code is Code.OK
            problems = {w.worker_id: w.problem for w in (await running.status()).workers}
            assert "weights" in problems["decode-0"]
            assert problems["decode-1"] == problems["prefill-0"] == ""

    asyncio.run(main())


def test_a_request_waits_for_its_workers(config: TandemConfig, folder: ModelFolder) -> None:
    async def main() -> None:
        async with cluster(config, folder, num_decode=0) as running:
            asking = asyncio.ensure_future(running.ask())
            while not (await running.status()).requests_running:
                pass
            await running.add(FakeDecode("decode-0", folder))
            assert (await asking).code is Code.OK

    asyncio.run(main())


def test_without_workers_a_request_ends_and_says_which_are_missing(
    config: TandemConfig, folder: ModelFolder
) -> None:
    router = dataclasses.replace(config.router, worker_wait_s=0.1)
    config = dataclasses.replace(config, router=router)

    async def main() -> None:
        async with cluster(config, folder, num_decode=0) as running:
            outcome = await running.ask()
            assert outcome.code is Code.UNAVAILABLE
            assert outcome.message == "worker decode: none is ready; waited 0.1 s for one"

    asyncio.run(main())


def test_reflection_lists_the_services(config: TandemConfig, folder: ModelFolder) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
            call = stub.ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=20
            )
            names = {service.name for service in (await call.read()).list_services_response.service}
            assert names == {
                "tandem.v1.Tandem",
                "grpc.health.v1.Health",
                "grpc.reflection.v1alpha.ServerReflection",
            }

    asyncio.run(main())


def test_model_info_names_the_longest_prompt_that_workers_hold(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def main() -> None:
        async with cluster(config, folder, num_decode=0) as running:
            request = generate_pb2.GetModelInfoRequest()
            info = await running.stub.GetModelInfo(request, timeout=20)
            assert (info.max_context_tokens, info.max_prompt_tokens) == (512, 511)
            await running.add(FakeDecode("decode-0", folder, pages_total=10))
            assert (await running.ask()).code is Code.OK
            info = await running.stub.GetModelInfo(request, timeout=20)
            assert info.max_prompt_tokens == 159
            assert (info.model, info.architecture, info.dtype) == ("tiny", "llama", "float32")
            assert (info.vocab_size, info.has_chat_template) == (260, True)
            assert info.weights_digest == folder.weights_digest
            assert list(info.eos_token_ids) == [258]

    asyncio.run(main())


def test_status_asks_the_workers_and_falls_back_to_their_last_report(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            prefill, decode = running.prefill[0], running.decode[0]
            assert (await running.ask()).code is Code.OK
            decode.status = WorkerStatus(pages_used=3, pages_cached=2, running=1, graph="graph 1,2")
            status = await running.status()
            assert [worker.worker_id for worker in status.workers] == ["prefill-0", "decode-0"]
            shown = status.workers[1]
            assert shown == decode.status.to_wire(decode.identity)
            assert (shown.state, shown.pages_total, shown.pid) == ("ready", 64, decode.identity.pid)
            await prefill.die()
            while (shown := (await running.status()).workers[0]).state != "unreachable":
                pass
            assert (shown.worker_id, shown.incarnation) == (
                "prefill-0",
                prefill.identity.incarnation,
            )

    asyncio.run(main())


def test_a_worker_that_leaves_in_good_order_is_forgotten(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            decode = running.decode[0]
            assert (await running.ask()).code is Code.OK
            decode.status = WorkerStatus(state="draining")
            decode.membership.report_now()
            health = running.health()
            while await anext(health) == SERVING:
                pass
            await decode.leave()
            while len((await running.status()).workers) > 1:
                pass

    asyncio.run(main())


def test_nobody_joins_without_the_cluster_s_token(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def main() -> None:
        async with (
            cluster(config, folder, num_decode=0) as running,
            grpc.aio.insecure_channel(running.addresses.registry) as channel,
        ):
            stub: worker_pb2_grpc.RegistryAsyncStub = worker_pb2_grpc.RegistryStub(channel)
            for metadata in ((), (("authorization", "Bearer " + "00" * 32),)):
                report = worker_pb2.WorkerReport(
                    info=FakeDecode("decode-0", folder).identity.to_wire()
                )
                call = stub.Join(iter([report]), metadata=metadata, timeout=20)
                assert await call.code() is Code.UNAUTHENTICATED
            assert len((await running.status()).workers) == 1

    asyncio.run(main())


def test_a_malformed_first_report_is_refused(config: TandemConfig, folder: ModelFolder) -> None:
    async def main() -> None:
        async with (
            cluster(config, folder) as running,
            grpc.aio.insecure_channel(running.addresses.registry) as channel,
        ):
            stub: worker_pb2_grpc.RegistryAsyncStub = worker_pb2_grpc.RegistryStub(channel)
            token = (("authorization", f"Bearer {SECRET.hex()}"),)
            report = worker_pb2.WorkerReport(status=generate_pb2.WorkerState(state="ready"))
            call = stub.Join(iter([report]), metadata=token, timeout=20)
            assert await call.code() is Code.INTERNAL
            assert (await running.ask()).code is Code.OK

    asyncio.run(main())


@pytest.mark.parametrize("field", ["port", "registry_port"])
def test_a_port_in_use_is_a_configuration_error(
    config: TandemConfig, folder: ModelFolder, field: str
) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            taken = int(running.addresses.public.rpartition(":")[2])
            changes: dict[str, Any] = {field: taken}
            router = dataclasses.replace(config.router, **changes)
            server = RouterServer(dataclasses.replace(config, router=router), folder, SECRET)
            with pytest.raises(ConfigError) as caught:
                await server.run(asyncio.Event(), lambda _: None)
            assert caught.value.field == f"router.{field}"
            assert str(taken) in caught.value.problem

    asyncio.run(main())


def test_ten_mebibytes_of_text_are_refused_by_name(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            request = greedy("x" * (10 << 20), max_tokens=3)
            outcome = await generate(running.stub, request)
            assert outcome.code is Code.INVALID_ARGUMENT
            assert outcome.message.startswith("text: has 10485760 bytes; at most 1048576")
            outcome = await generate(running.stub, greedy("x" * (1 << 20), max_tokens=3))
            assert outcome.code is Code.INVALID_ARGUMENT
            assert outcome.message.startswith("text: has 1048576 tokens; the context is 512")
            assert not running.decode[0].started

    asyncio.run(main())


@pytest.mark.parametrize("small", [FakePrefill, FakeDecode])
def test_what_never_fits_the_pools_is_refused_and_blocks_nobody(
    config: TandemConfig, folder: ModelFolder, small: type[FakePrefill | FakeDecode]
) -> None:
    async def main() -> None:
        async with cluster(config, folder, num_prefill=0, num_decode=0) as running:
            for role in (FakePrefill, FakeDecode):
                pages = 4 if role is small else 64
                await running.add(role(role.role, folder, pages_total=pages))
            assert (await running.ask()).code is Code.OK
            big = generate(running.stub, greedy("x" * 100, max_tokens=3))
            outcomes = await asyncio.gather(big, *(running.ask() for _ in range(5)))
            assert outcomes[0].code is Code.INVALID_ARGUMENT
            for number in ("100 tokens", "64", "1024", "512"):
                assert number in outcomes[0].message
            assert {outcome.code for outcome in outcomes[1:]} == {Code.OK}

    asyncio.run(main())


def test_output_beyond_decode_s_pool_is_refused_or_cut(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def main() -> None:
        async with cluster(config, folder, num_decode=0) as running:
            asking = asyncio.ensure_future(  # checked only once there is a pool to check against
                generate(running.stub, greedy("x" * 40, max_tokens=30))
            )
            while not (await running.status()).requests_running:
                pass
            decode = await running.add(FakeDecode("decode-0", folder, pages_total=4))
            outcome = await asking
            assert outcome.code is Code.INVALID_ARGUMENT
            assert outcome.message.startswith("stopping.max_tokens: is 30;")
            assert "64" in outcome.message
            request = greedy("x" * 40, max_tokens=1)
            request.stopping.ClearField("max_tokens")
            assert (await generate(running.stub, request)).code is Code.OK
            assert decode.started[0].stopping.max_tokens == 24

    asyncio.run(main())


def test_a_drain_refuses_new_requests_and_lets_running_ones_finish(
    config: TandemConfig, folder: ModelFolder
) -> None:
    config = dataclasses.replace(
        config, workers=dataclasses.replace(config.workers, drain_timeout_s=20.0)
    )

    async def main() -> None:
        async with cluster(config, folder) as running:
            go_on = asyncio.Event()

            async def script(session: Session) -> None:
                await session.reserve()
                await session.arrival()
                await session.send(0, [65])
                await go_on.wait()
                await session.send(1, [66], generate_pb2.FINISH_REASON_STOP)

            running.decode[0].script = script
            call = running.stub.Generate(greedy("hello", max_tokens=3))
            stream = aiter(call)
            await anext(stream)
            health = running.health()
            assert await anext(health) == SERVING
            running.stopping.set()
            assert await anext(health) == NOT_SERVING
            outcome = await running.ask()
            assert outcome.code is Code.UNAVAILABLE
            assert "stopping" in outcome.message
            go_on.set()
            assert [response.WhichOneof("event") async for response in stream][-1] == "finished"

    asyncio.run(main())


def test_requests_that_outlast_the_drain_end_unavailable(
    config: TandemConfig, folder: ModelFolder
) -> None:
    async def main() -> None:
        async with cluster(config, folder) as running:
            running.prefill[0].script = forever
            asking = asyncio.ensure_future(running.ask())
            await running.prefill[0].until(lambda: bool(running.prefill[0].started))
            running.stopping.set()
            outcome = await asking
            assert outcome.code is Code.UNAVAILABLE
            assert "stopped before the request was finished" in outcome.message
            decode = running.decode[0]
            await decode.until(lambda: len(decode.cancelled) == 1)

    asyncio.run(main())
