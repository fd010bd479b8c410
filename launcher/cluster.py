"""Ray: a local cluster or one that is joined, and the actors placed on it."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode_worker.actor import DecodeActor
from launcher.colocated import ColocatedActor
from launcher.preflight import Plan
from prefill_worker.actor import PrefillActor
from router.actor import RouterActor
from tandem.config.tree import TandemConfig
from tandem.errors import ServingError
from tandem.secret import Secret

_CONCURRENT_CALLS = 4  # of one actor: a state that is waited for must not keep stop() waiting


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A Ray that this process is connected to."""

    ray: Any
    """The module, imported only after its environment was set."""
    logs: Path
    """Where this machine's processes of the cluster write their logs."""

    def last_words(self, pid: int) -> str:
        """The last line that process ``pid`` wrote to its log, unless all was well by then."""
        for log in self.logs.glob(f"worker-*-{pid}.err"):
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return lines[-1].strip() if lines and " INFO " not in lines[-1] else ""
        return ""


@contextmanager
def connect(config: TandemConfig, cpus: int) -> Iterator[Cluster]:
    """Start a local Ray, or join the one at `ray.address`; leave nothing of a local one behind.

    Args:
        config: the whole tree.
        cpus: what a local Ray may hand out; its actors share the real cores.

    Raises:
        ServingError: Ray does not start or cannot be joined.
    """
    local = not config.ray.address
    _set_environment(config, local)
    import ray  # reads its environment when imported

    # Unix sockets live below it, whose paths may not be longer than 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="tandem-", dir="/tmp")) if local else None
    options: dict[str, Any] = {"address": config.ray.address}
    if local:
        options = {
            "address": "local",
            "num_cpus": cpus,
            "num_gpus": 0,
            "object_store_memory": config.ray.object_store_bytes,
            "include_dashboard": False,
            "_temp_dir": str(folder),
        }
    try:
        ray.init(
            **options,
            log_to_driver=config.log.level == "debug",
            logging_level="ERROR",
            namespace="tandem",
        )
    except (ConnectionError, RuntimeError, TimeoutError, ValueError, OSError) as error:
        where = config.ray.address or "a local cluster"
        raise ServingError(f"Ray did not start ({where}): {error}") from error
    try:
        yield Cluster(ray=ray, logs=Path(ray._private.worker._global_node.get_logs_dir_path()))
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _set_environment(config: TandemConfig, local: bool) -> None:
    os.environ["RAY_AUTH_MODE"] = config.ray.auth_mode
    if config.ray.auth_mode == "token" and local:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if local:
        os.environ.pop("RAY_ADDRESS", None)  # of another cluster


class Placement:
    """Creates the actors of one deployment; Ray restarts each that dies."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        """Draw the secret; nothing is started yet."""
        self._ray = cluster.ray
        self._config = plan.config
        self._resolved = plan.resolved
        self._folder = plan.folder
        self._secret = Secret.draw()

    def router(self) -> Any:
        """The router, on this machine, where its address stays the same."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(
            self._ray.get_runtime_context().get_node_id(), soft=False
        )
        return self._actor(RouterActor, "router", cpus=0, scheduling_strategy=here).remote(
            self._config, self._folder, self._secret
        )

    def workers(self, registry_address: str) -> dict[str, Any]:
        """All workers by name, told where to join."""
        config, resolved = self._config, self._resolved
        if config.mode == "colocated":
            return {
                f"colocated-{number}": self._actor(
                    ColocatedActor, f"colocated-{number}", cpus=resolved.decode_threads
                ).remote(config, self._folder, self._secret, number, registry_address)
                for number in range(config.decode.replicas)
            }
        kinds = (
            ("prefill", PrefillActor, config.prefill.replicas, resolved.prefill_threads),
            ("decode", DecodeActor, config.decode.replicas, resolved.decode_threads),
        )
        return {
            f"{role}-{number}": self._actor(actor, f"{role}-{number}", cpus=threads).remote(
                config, self._folder, self._secret, f"{role}-{number}", registry_address
            )
            for role, actor, replicas, threads in kinds
            for number in range(replicas)
        }

    def _actor(self, kind: type, name: str, *, cpus: int, **options: object) -> Any:
        threads = str(max(1, cpus))
        return self._ray.remote(kind).options(
            name=name,
            num_cpus=cpus,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=_CONCURRENT_CALLS,
            # Before the process starts: the libraries read these when they are loaded.
            runtime_env={"env_vars": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}},
            **options,
        )
