"""The life of a prompt on a prefill worker, and the loop that computes.

Each prompt is a coroutine, `PrefillEngine.prefill`; cancelling it takes the prompt out wherever it
stands. Its pages come back once neither a forward pass writes them nor the transfer reads them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kv_transfer.sender import KVSender
from kv_transfer.stream import KVStream
from prefill_worker.scheduler import Chunk, PrefillScheduler, Prompt
from tandem.device import DeviceThread
from tandem.errors import TransferError, WorkerError
from tandem.models.model import PrefillSequence
from tandem.requests import GenerateRequest, Handover, SampledToken
from tandem.sampling.sampler import SequenceSampler, sample
from tandem.workers import WorkerStatus

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What computes a forward pass; `PrefillRunner` is one."""

    def run(self, sequences: Sequence[PrefillSequence], on_layer: Callable[[int], None]) -> Tensor:
        """Compute; call ``on_layer`` after each layer; return logits of the complete prompts."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """What sampling needs to know of the tokenizer."""

    size: int
    eos_token_ids: Collection[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillOutcome:
    """What a prompt took, once the decode worker has all of it."""

    cached_tokens: int
    queue_ms: float
    compute_ms: float
    transfer_ms: float
    transferred_bytes: int


class _Work:
    """What belongs to one prompt besides the scheduler's accounts."""

    def __init__(self, stream: KVStream, sampler: SequenceSampler) -> None:
        self.stream = stream
        self.sampler = sampler
        self.error: WorkerError | None = None
        self.sending = True
        self.started_at_s = 0.0
        self.computed_at_s = 0.0

    def send(self, layer: int, page_ids: Sequence[int], first_page: int) -> None:
        """Called in the device thread; the prompt's own coroutine learns of a broken stream."""
        if not self.sending:
            return
        try:
            self.stream.send_layer(layer, page_ids, first_page)
        except TransferError as error:
            self.sending = False
            self.stream.abort(error.reason)


class PrefillEngine:
    """Computes prompts in batches and streams their K and V away, layer by layer."""

    def __init__(  # noqa: PLR0913 - the parts that a worker has made
        self,
        *,
        worker_id: str,
        scheduler: PrefillScheduler,
        runner: Runner,
        num_layers: int,
        vocabulary: Vocabulary,
        sender: KVSender,
        device_thread: DeviceThread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is computed before `run`.

        Args:
            worker_id: named in errors.
            scheduler: accounts for the pages that ``runner`` writes and ``sender`` reads.
            runner: called in ``device_thread`` only.
            num_layers: of the model.
            vocabulary: of the tokenizer.
            sender: opens one stream for each prompt.
            device_thread: perhaps shared with a decode engine.
            clock: seconds, for timings.
        """
        self._worker_id = worker_id
        self._scheduler = scheduler
        self._runner = runner
        self._num_layers = num_layers
        self._vocabulary = vocabulary
        self._sender = sender
        self._device_thread = device_thread
        self._clock = clock
        self._works: dict[Prompt, _Work] = {}
        self._wake = asyncio.Event()
        self._leaving: asyncio.Queue[tuple[Prompt, _Work]] = asyncio.Queue()

    def status(self) -> WorkerStatus:
        """Counts as of now."""
        return WorkerStatus(
            pages_used=self._scheduler.pages_used,
            pages_cached=self._scheduler.pages_cached,
            running=self._scheduler.num_running,
            queued=self._scheduler.num_queued,
            transfers_pending=self._sender.pending,
        )

    async def run(self) -> None:
        """Compute until cancelled; an error that concerns no single prompt ends it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._compute_all(), name=f"{self._worker_id}/compute")
            while True:  # those that left before their transfer ended
                prompt, work = await self._leaving.get()
                name = f"{prompt.request.request_id}/release"
                tasks.create_task(self._free_after_transfer(prompt, work), name=name)

    async def prefill(self, request: GenerateRequest, target: bytes) -> PrefillOutcome:
        """Compute a prompt into ``target`` and return when the decode worker has all of it.

        Raises:
            RequestTooLong: the prompt can never fit.
            Overloaded: the queue is full.
            TransferError: the decode worker did not get it.
            WorkerError: the model failed.
        """
        arrived_at_s = self._clock()
        prompt = self._scheduler.add(request)
        try:
            stream = await self._sender.open(target, request.request_id)
        except BaseException:
            self._scheduler.free(prompt)
            raise
        work = self._works[prompt] = _Work(stream, self._sampler(request))
        reading = True
        try:
            self._scheduler.open(prompt)
            self._wake.set()
            stats = await stream.wait()
            reading = False
        except TransferError as error:
            reading = False
            raise work.error or error from None
        finally:
            self._leave(prompt, work, reading=reading)
        return PrefillOutcome(
            cached_tokens=prompt.cached_tokens,
            queue_ms=(work.started_at_s - arrived_at_s) * 1e3,
            compute_ms=(work.computed_at_s - work.started_at_s) * 1e3,
            transfer_ms=max(0.0, self._clock() - work.computed_at_s) * 1e3,
            transferred_bytes=stats.nbytes,
        )

    def _sampler(self, request: GenerateRequest) -> SequenceSampler:
        return SequenceSampler(
            request.sampling,
            request.stop,
            request.token_ids,
            self._vocabulary.eos_token_ids,
            self._vocabulary.size,
        )

    def _leave(self, prompt: Prompt, work: _Work, *, reading: bool) -> None:
        """The prompt's coroutine ends; ``reading``: the transfer may still read the pages."""
        if not reading:
            self._free(prompt)
            return
        self._scheduler.stop(prompt)
        work.stream.abort("the request was cancelled")
        self._leaving.put_nowait((prompt, work))

    async def _free_after_transfer(self, prompt: Prompt, work: _Work) -> None:
        with suppress(TransferError):
            await work.stream.wait()
        self._free(prompt)

    def _free(self, prompt: Prompt) -> None:
        self._scheduler.free(prompt)
        self._works.pop(prompt, None)
        self._wake.set()  # another prompt may have waited for these pages

    async def _compute_all(self) -> None:
        while True:
            chunks = self._scheduler.plan()
            if chunks:
                await self._compute(chunks)
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _compute(self, chunks: Sequence[Chunk]) -> None:
        works = [self._works[chunk.prompt] for chunk in chunks]
        for chunk, work in zip(chunks, works, strict=True):
            if chunk.is_first:
                work.started_at_s = self._clock()
        done = await self._device_thread.run(lambda: self._run_pass(chunks, works))
        error = done.exception()
        complete = self._scheduler.end_pass(chunks, computed=error is None)
        if error is not None:
            self._fail(chunks, works, error)
            return
        tokens = iter(done.result())
        for chunk, work in zip(chunks, works, strict=True):
            token = next(tokens) if chunk.is_last else None
            if token is not None and chunk.prompt in complete:
                self._hand_over(chunk.prompt, work, token)

    def _run_pass(self, chunks: Sequence[Chunk], works: Sequence[_Work]) -> list[SampledToken]:
        """In the device thread: the layers of a chunk leave one by one while the next computes."""
        for chunk, work in zip(chunks, works, strict=True):
            if chunk.is_first and chunk.start > 0:
                for layer in range(self._num_layers):
                    work.send(layer, chunk.prompt.page_ids[: chunk.first_page], 0)

        def on_layer(layer: int) -> None:
            for chunk, work in zip(chunks, works, strict=True):
                work.send(layer, chunk.written_page_ids, chunk.first_page)

        logits = self._runner.run(
            [
                PrefillSequence(
                    token_ids=chunk.token_ids,
                    start=chunk.start,
                    page_ids=chunk.page_ids,
                    needs_logits=chunk.is_last,
                )
                for chunk in chunks
            ],
            on_layer,
        )
        samplers = [
            work.sampler for chunk, work in zip(chunks, works, strict=True) if chunk.is_last
        ]
        return sample(logits, samplers) if samplers else []

    def _hand_over(self, prompt: Prompt, work: _Work, token: SampledToken) -> None:
        work.computed_at_s = self._clock()
        handover = Handover(
            first_token=token,
            prompt_tokens=prompt.num_tokens,
            cached_tokens=prompt.cached_tokens,
        )
        with suppress(TransferError):  # raised by the stream's wait as well
            work.stream.finish(handover)

    def _fail(self, chunks: Sequence[Chunk], works: Sequence[_Work], error: BaseException) -> None:
        """The model failed: so do the prompts of this pass, and nobody else."""
        logger.error(
            "worker=%s a prefill pass failed requests=%s",
            self._worker_id,
            ",".join(chunk.prompt.request.request_id for chunk in chunks),
            exc_info=error,
        )
        for chunk, work in zip(chunks, works, strict=True):
            work.error = WorkerError(
                self._worker_id, f"computing the prompt failed: {type(error).__name__}: {error}"
            )
            self._scheduler.stop(chunk.prompt)
            work.stream.abort("computing the prompt failed")
