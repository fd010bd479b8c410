"""A decode worker as a Ray actor: the process's outermost shell."""

from __future__ import annotations

import asyncio

from tandem.actors import Host, HostActor, OnReady
from tandem.config.tree import TandemConfig
from tandem.logs import write_logs
from tandem.secret import Secret
from tandem.weights.store import ModelFolder


class DecodeActor(HostActor):
    """Hosts one `DecodeWorker`; made a Ray actor by the launcher."""

    def __init__(
        self,
        config: TandemConfig,
        folder: ModelFolder,
        secret: Secret,
        worker_id: str,
        registry_address: str,
    ) -> None:
        """Start the worker; `next_state` tells how far it is."""
        write_logs(config.log)

        async def serve(stopping: asyncio.Event, on_ready: OnReady) -> None:
            # Imports torch: in this process only, after Ray has set its environment.
            from decode_worker.worker import DecodeWorker

            worker = DecodeWorker(config, folder, secret.reveal(), worker_id, registry_address)
            await worker.run(stopping, on_ready)

        super().__init__(Host(worker_id, serve))
