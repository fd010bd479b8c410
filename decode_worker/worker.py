"""A decode worker as a process: loads the model, serves, drains."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import grpc.aio
import torch

from decode_worker.engine import DecodeEngine, OutputRules, Runner
from decode_worker.runner import DecodeRunner
from decode_worker.scheduler import DecodeScheduler
from decode_worker.service import DecodeService
from decode_worker.swap import PageSwap
from kv_transfer.layout import KVLayout
from kv_transfer.model_layout import model_layout
from kv_transfer.receiver import KVReceiver
from tandem.cache.pages import PageAllocator
from tandem.cache.pool import KVPool
from tandem.cache.prefix import PrefixCache
from tandem.config.resolve import ResolvedConfig, available_memory_bytes, resolve, usable_cores
from tandem.config.tree import TandemConfig
from tandem.device import DeviceThread
from tandem.models.model import Model
from tandem.models.registry import load_model
from tandem.pb import worker_pb2_grpc
from tandem.tokenizer import load_tokenizer
from tandem.weights.store import ModelFolder
from tandem.workers import WorkerIdentity, model_identity, new_incarnation
from tandem.workerserver import GetState, WorkerServer

logger = logging.getLogger(__name__)
_AUTO_SWAP_POOLS = 2


class DecodeWorker:
    """Runs in any process with an event loop; knows nothing of Ray."""

    def __init__(
        self,
        config: TandemConfig,
        folder: ModelFolder,
        secret: bytes,
        worker_id: str,
        registry_address: str | None,
        device_thread: DeviceThread | None = None,
    ) -> None:
        """Nothing happens before `run`.

        Args:
            config: the whole tree.
            folder: the model to serve.
            secret: the cluster's, at least 16 bytes.
            worker_id: stable over restarts.
            registry_address: host:port at which the router registers workers; None joins nowhere.
            device_thread: shared with another worker in this process; None makes an own one.
        """
        self._config = config
        self._folder = folder
        self._secret = secret
        self._worker_id = worker_id
        self._registry_address = registry_address
        self._device_thread = device_thread

    def make_runner(self, model: Model, pool: KVPool) -> Runner:
        """What computes steps, graphs captured; called in the device thread."""
        decode = self._config.decode
        runner = DecodeRunner(model, pool, decode.buckets, decode.graph, self._progress)
        runner.warm_up()
        return runner

    async def run(self, stopping: asyncio.Event, on_ready: Callable[[str], None]) -> None:
        """Load, serve, join the registry, drain when ``stopping`` is set, return.

        Args:
            stopping: set by whoever wants the worker to stop.
            on_ready: called once with the host:port of the worker's server.

        Raises:
            ConfigError: a setting is impossible here.
            WeightsError: the model's files cannot be used.
        """
        resolved = resolve(
            self._config, self._folder.spec, usable_cores(), available_memory_bytes()
        )
        thread = self._device_thread or DeviceThread(self._worker_id)
        try:
            loaded = await thread.run(lambda: self._load(resolved, thread))
            runner, pool = loaded.result()
            await self._serve(resolved, runner, pool, thread, stopping, on_ready)
        finally:
            if thread is not self._device_thread:
                thread.close()

    def _load(self, resolved: ResolvedConfig, thread: DeviceThread) -> tuple[Runner, KVPool]:
        torch.set_num_threads(resolved.decode_threads)
        model = thread.model(lambda: load_model(self._folder, resolved.dtype, self._progress))
        groups = self._folder.spec.cache_groups(self._config.decode_page_tokens, resolved.dtype)
        pool = KVPool(groups, resolved.decode_pages + 1)
        return self.make_runner(model, pool), pool

    async def _serve(
        self,
        resolved: ResolvedConfig,
        runner: Runner,
        pool: KVPool,
        thread: DeviceThread,
        stopping: asyncio.Event,
        on_ready: Callable[[str], None],
    ) -> None:
        incarnation = new_incarnation()
        layout = model_layout(self._folder, self._config.decode_page_tokens, resolved.dtype)
        receiver = KVReceiver(pool, layout, self._config.transfer, self._secret, incarnation)
        engine = self._engine(resolved, runner, pool, receiver, thread)
        worker_server = WorkerServer(
            self._config, self._secret, self._worker_id, self._registry_address, engine
        )

        def add_service(server: grpc.aio.Server, state: GetState) -> None:
            service = DecodeService(engine, worker_server.calls, state)
            worker_pb2_grpc.add_DecodeWorkerServicer_to_server(service, server)

        await receiver.start()
        try:
            await worker_server.run(
                stopping,
                on_ready,
                lambda address: self._identity(address, incarnation, resolved, layout),
                add_service,
            )
        finally:
            await receiver.close()

    def _engine(
        self,
        resolved: ResolvedConfig,
        runner: Runner,
        pool: KVPool,
        receiver: KVReceiver,
        thread: DeviceThread,
    ) -> DecodeEngine:
        cache, decode = self._config.cache, self._config.decode
        tokenizer = load_tokenizer(self._folder)
        pages = PageAllocator(pool.num_pages)
        swap_bytes = decode.swap_bytes or _AUTO_SWAP_POOLS * pool.nbytes
        return DecodeEngine(
            worker_id=self._worker_id,
            scheduler=DecodeScheduler(
                pages,
                PrefixCache(pages, self._config.decode_page_tokens, cache.prefix_reuse),
                resolved.max_context_tokens,
                decode,
                swap_pages=swap_bytes * pool.num_pages // pool.nbytes,
            ),
            runner=runner,
            swap=PageSwap(pool),
            rules=OutputRules(
                tokenizer=tokenizer,
                vocab_size=min(tokenizer.vocab_size, self._folder.spec.vocab_size),
                max_context_tokens=resolved.max_context_tokens,
                max_unread_chunks=decode.max_unread_chunks,
            ),
            receiver=receiver,
            device_thread=thread,
        )

    def _identity(
        self, address: str, incarnation: str, resolved: ResolvedConfig, layout: KVLayout
    ) -> WorkerIdentity:
        return WorkerIdentity(
            role="decode",
            worker_id=self._worker_id,
            incarnation=incarnation,
            pid=os.getpid(),
            address=address,
            model=model_identity(self._config, self._folder, resolved),
            pages_total=resolved.decode_pages,
            page_tokens=self._config.decode_page_tokens,
            layout_digest=layout.digest(),
        )

    def _progress(self, what: str, done: int, total: int) -> None:
        logger.info("worker=%s %s done=%d total=%d", self._worker_id, what, done, total)
