"""What the router's tests share."""

from __future__ import annotations

import dataclasses

import pytest

from tandem.config.tree import RouterConfig, TandemConfig, WorkersConfig
from tandem.testing.tiny import write_tiny_llama
from tandem.weights.store import ModelFolder, prepare


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("tiny") / "tiny"
    write_tiny_llama(path)
    return prepare(str(path))


@pytest.fixture
def config() -> TandemConfig:
    router = RouterConfig(
        port=0, worker_wait_s=10.0, heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0
    )
    return dataclasses.replace(
        TandemConfig(), router=router, workers=WorkersConfig(drain_timeout_s=0.2)
    )
