"""Deployments that the tests of this folder share; each starts when a test first asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from tandem.pb import generate_pb2_grpc
from tandem.testing.cluster import ServedCluster, served_cluster
from tandem.testing.tiny import write_tiny_llama

if TYPE_CHECKING:  # the asynchronous stub is a type only
    Scenario = Callable[[generate_pb2_grpc.TandemAsyncStub], Awaitable[None]]
    RunScenario = Callable[[Scenario], None]


def _runner(cluster: ServedCluster) -> RunScenario:
    def run(scenario: Scenario) -> None:
        async def main() -> None:
            options = [("grpc.max_send_message_length", 64 * 1024 * 1024)]
            async with grpc.aio.insecure_channel(cluster.address, options=options) as channel:
                await scenario(generate_pb2_grpc.TandemStub(channel))

        asyncio.run(main())

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_cluster(tiny_model: Path) -> Iterator[ServedCluster]:
    """One prefill and one decode worker."""
    with served_cluster([f"model.name={tiny_model}"]) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def with_stub(tiny_cluster: ServedCluster) -> RunScenario:
    """Runs a scenario against one prefill and one decode worker."""
    return _runner(tiny_cluster)


@pytest.fixture
def with_two_by_two(tiny_model: Path) -> Iterator[RunScenario]:
    """Runs a scenario against two prefill and two decode workers."""
    sets = [f"model.name={tiny_model}", "prefill.replicas=2", "decode.replicas=2"]
    with served_cluster(sets) as cluster:
        yield _runner(cluster)


@pytest.fixture
def with_colocated(tiny_model: Path) -> Iterator[RunScenario]:
    """Runs a scenario against one worker that does both phases."""
    with served_cluster([f"model.name={tiny_model}", "mode=colocated"]) as cluster:
        yield _runner(cluster)


@pytest.fixture(scope="session", params=["disaggregated", "colocated"])
def with_smollm2(request: pytest.FixtureRequest) -> Iterator[RunScenario]:
    """Runs a scenario against the demo model, with prefill and decode apart and together."""
    sets = ["model.name=smollm2", f"mode={request.param}"]
    # One compute thread each: a second one only spins where other processes want the cores.
    sets += ["prefill.threads=1", "decode.threads=1"]
    with served_cluster(sets) as cluster:
        yield _runner(cluster)
