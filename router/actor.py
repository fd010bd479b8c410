"""The router as a Ray actor: the process's outermost shell."""

from __future__ import annotations

import asyncio

from router.server import RouterServer
from tandem.actors import Host, HostActor, OnReady
from tandem.config.tree import TandemConfig
from tandem.logs import write_logs
from tandem.secret import Secret
from tandem.weights.store import ModelFolder


class RouterActor(HostActor):
    """Hosts the `RouterServer`; made a Ray actor by the launcher."""

    def __init__(self, config: TandemConfig, folder: ModelFolder, secret: Secret) -> None:
        """Start the router; its addresses are the public one and the registry's."""
        write_logs(config.log)

        async def serve(stopping: asyncio.Event, on_ready: OnReady) -> None:
            server = RouterServer(config, folder, secret.reveal())
            await server.run(
                stopping, lambda addresses: on_ready(addresses.public, addresses.registry)
            )

        super().__init__(Host("router", serve))
