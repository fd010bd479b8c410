"""A general gRPC client that knows nothing of Tandem: buf curl, through reflection."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.testing.cluster import ServedCluster

pytestmark = pytest.mark.ray

BUF = Path(sys.executable).parent / "buf"


def _buf_curl(cluster: ServedCluster, method: str, *arguments: str) -> str:
    done = subprocess.run(
        [
            BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *arguments,
            f"http://{cluster.address}/{method}",
        ],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_services_are_listed(tiny_cluster: ServedCluster) -> None:
    services = _buf_curl(tiny_cluster, "", "--list-services").split()
    assert "tandem.v1.Tandem" in services
    assert "grpc.health.v1.Health" in services


def test_generate_streams(tiny_cluster: ServedCluster) -> None:
    body = {
        "text": "hello",
        "sampling": {"temperature": 0},
        "stopping": {"maxTokens": 5, "ignoreEos": True},
    }
    output = _buf_curl(
        tiny_cluster, "tandem.v1.Tandem/Generate", "--emit-defaults", "-d", json.dumps(body)
    )
    decoder = json.JSONDecoder()
    messages = []
    while output := output.strip():
        message, end = decoder.raw_decode(output)
        messages.append(message)
        output = output[end:]
    assert sum(len(m["chunk"]["tokenIds"]) for m in messages[:-1]) == 5
    assert messages[-1]["finished"]["finishReason"] == "FINISH_REASON_LENGTH"


def test_health_is_serving(tiny_cluster: ServedCluster) -> None:
    output = _buf_curl(tiny_cluster, "grpc.health.v1.Health/Check", "-d", "{}")
    assert json.loads(output)["status"] == "SERVING"
