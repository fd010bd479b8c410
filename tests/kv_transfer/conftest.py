from __future__ import annotations

import pytest

from kv_transfer.layout import KVLayout
from kv_transfer.testing import GROUPS, MakePair, layout_of, make_pair
from kv_transfer.transports.shm import shared_memory_problem
from tandem.testing.certificates import Authority


def _skip_without(transport: str) -> None:
    if transport == "shm" and (problem := shared_memory_problem(())):
        pytest.skip(problem)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(params=["inproc", "inproc-pull", "tcp", "tls", "shm"])
def any_pair(request: pytest.FixtureRequest, authority: Authority) -> MakePair:
    """Every transport in turn."""
    _skip_without(request.param)
    if request.param == "tls":
        return lambda **settings: make_pair("tls", **{"tls": authority.config("w"), **settings})
    return lambda **settings: make_pair(request.param, **settings)


@pytest.fixture(params=["inproc", "inproc-pull"])
def inproc_pair(request: pytest.FixtureRequest) -> MakePair:
    return lambda **settings: make_pair(request.param, **settings)


@pytest.fixture(params=["tcp", "shm"])
def socket_pair(request: pytest.FixtureRequest) -> MakePair:
    _skip_without(request.param)
    return lambda **settings: make_pair(request.param, **settings)


@pytest.fixture
def mha_layout() -> KVLayout:
    return layout_of(GROUPS["mha"])
