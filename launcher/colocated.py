"""Both phases in one process that share one device thread; the same workers, for comparison."""

from __future__ import annotations

import asyncio

from tandem.actors import Host, HostActor, OnReady
from tandem.config.tree import TandemConfig
from tandem.logs import write_logs
from tandem.secret import Secret
from tandem.weights.store import ModelFolder


class ColocatedActor(HostActor):
    """Hosts a `PrefillWorker` and a `DecodeWorker`; made a Ray actor by the launcher."""

    def __init__(
        self,
        config: TandemConfig,
        folder: ModelFolder,
        secret: Secret,
        number: int,
        registry_address: str,
    ) -> None:
        """Start both workers; ready when both are."""
        write_logs(config.log)

        async def serve(stopping: asyncio.Event, on_ready: OnReady) -> None:
            from decode_worker.worker import DecodeWorker
            from prefill_worker.worker import PrefillWorker
            from tandem.device import DeviceThread

            thread = DeviceThread("device")
            ready: list[str] = []

            def one_ready(address: str) -> None:
                ready.append(address)
                if len(ready) == 2:
                    on_ready(*ready)

            async with asyncio.TaskGroup() as workers:
                for kind, role in ((PrefillWorker, "prefill"), (DecodeWorker, "decode")):
                    worker = kind(
                        config,
                        folder,
                        secret.reveal(),
                        f"{role}-{number}",
                        registry_address,
                        thread,
                    )
                    workers.create_task(worker.run(stopping, one_ready), name=role)
            thread.close()

        super().__init__(Host(f"colocated-{number}", serve))
