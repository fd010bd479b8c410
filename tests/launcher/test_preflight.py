from __future__ import annotations

import logging
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import preflight
from tandem.config.load import load
from tandem.config.resolve import resolve
from tandem.errors import ConfigError, WeightsError
from tandem.testing.tiny import write_tiny_llama
from tandem.weights.store import ModelFolder, prepare


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_llama(folder)
    return prepare(str(folder))


def silent(what: str, done: int, total: int) -> None:
    del what, done, total


def test_free_ports_are_chosen_once() -> None:
    config = preflight.fix_ports(load(None, ["router.port=0"]))
    assert config.router.port
    assert config.router.registry_port
    assert preflight.fix_ports(config) == config


@pytest.mark.parametrize("setting", ["router.port", "router.registry_port"])
def test_a_port_in_use_is_named_with_the_remedy(setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = load(None, ["router.port=0", f"{setting}={port}"])
        with pytest.raises(ConfigError) as caught:
            preflight.fix_ports(config)
    assert caught.value.field == setting
    assert f"127.0.0.1:{port}" in caught.value.problem
    assert f"--set {setting}=N" in caught.value.problem


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router\.port: 192\.0\.2\.77:0 cannot be bound"):
        preflight.fix_ports(load(None, ["router.port=0", "router.host=192.0.2.77"]))


def test_a_missing_compiler_is_an_error_a_warning_or_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"decode\.graph.*no-such-compiler.*install g\+\+"):
        preflight.check_compiler(load(None, ["decode.graph=on"]))
    with caplog.at_level(logging.WARNING):
        preflight.check_compiler(load(None, ["decode.graph=off"]))
        assert not caplog.records
        preflight.check_compiler(load(None))
    assert "no-such-compiler was not found" in caplog.text


def test_too_little_memory_is_refused_with_numbers(tiny: ModelFolder) -> None:
    config = load(None, ["prefill.replicas=2"])
    resolved = resolve(config, tiny.spec, cores=2, available_memory_bytes=8_000_000_000)
    preflight.check_memory(config, resolved, tiny, 8_000_000_000)
    with pytest.raises(ConfigError, match=r"on 3 workers needs about 1\.6 GB.*but 1\.0 GB are"):
        preflight.check_memory(config, resolved, tiny, 1_000_000_000)


def test_a_local_plan_fixes_what_a_restarted_worker_must_find_again(tiny: ModelFolder) -> None:
    config = load(None, ["router.port=0", f"model.name={tiny.path}", "decode.replicas=2"])
    plan = preflight.prepare_deployment(config, silent)
    assert plan.config.prefill.num_pages == plan.resolved.prefill_pages
    assert plan.config.decode.num_pages == plan.resolved.decode_pages
    assert plan.cpus == plan.resolved.prefill_threads + 2 * plan.resolved.decode_threads
    together = replace(plan, config=replace(plan.config, mode="colocated"))
    assert together.cpus == 2 * plan.resolved.decode_threads


def test_a_joined_plan_leaves_automatic_settings_to_the_workers(tiny: ModelFolder) -> None:
    config = load(None, ["router.port=0", f"model.name={tiny.path}", "ray.address=head:6379"])
    assert preflight.prepare_deployment(config, silent).config.decode.num_pages == 0


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    config = load(None, ["router.port=0", f"model.name={tmp_path / 'absent'}"])
    with pytest.raises(WeightsError, match="absent"):
        preflight.prepare_deployment(config, silent)
