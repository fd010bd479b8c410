"""The life of a request on a decode worker, and the loop that steps.

Each request is an asynchronous generator, `DecodeEngine.decode`; closing it takes the request out
wherever it stands. Its pages come back once neither a step nor a transfer can write into them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from decode_worker.outbox import Outbox
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence
from decode_worker.swap import PageSwap, SavedPages
from kv_transfer.receiver import KVReceiver
from kv_transfer.reservation import Reservation
from tandem.device import DeviceThread
from tandem.errors import RequestError, TransferCorrupt, WorkerError
from tandem.models.model import DecodeRow
from tandem.requests import GenerateRequest, Handover, OutputChunk, SampledToken
from tandem.sampling.output import OutputStream
from tandem.sampling.sampler import SequenceSampler, sample
from tandem.tokenizer import Tokenizer
from tandem.workers import WorkerStatus

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What computes a step; `DecodeRunner` is one."""

    @property
    def graph_summary(self) -> str:
        """Which batch sizes replay a graph, or that none does."""
        ...

    def step(self, rows: Sequence[DecodeRow]) -> Tensor:
        """Compute one token's logits for each row."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """Pages are held: prefill may send to ``target``."""

    target: bytes
    cached_pages: int
    """Leading pages that are here already and need no transfer."""


class _Life:
    """What belongs to one request besides the scheduler's accounts."""

    def __init__(self, outbox: Outbox) -> None:
        self.admitted = asyncio.Event()
        self.outbox = outbox
        self.reservation: Reservation | None = None
        self.sampler: SequenceSampler | None = None
        self.output: OutputStream | None = None
        self.saved: SavedPages | None = None
        """Its K and V while it is preempted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputRules:
    """What turning tokens into output needs besides the request."""

    tokenizer: Tokenizer
    vocab_size: int
    """Ids from here on are never drawn."""
    max_context_tokens: int
    max_unread_chunks: int


class DecodeEngine:
    """Continuous batching: every step takes all requests that are ready for it."""

    def __init__(  # noqa: PLR0913 - the parts that a worker has made
        self,
        *,
        worker_id: str,
        scheduler: DecodeScheduler,
        runner: Runner,
        swap: PageSwap,
        rules: OutputRules,
        receiver: KVReceiver,
        device_thread: DeviceThread,
    ) -> None:
        """Nothing is decoded before `run`.

        Args:
            worker_id: named in errors.
            scheduler: accounts for the pages that ``runner`` and ``receiver`` write.
            runner: called in ``device_thread`` only.
            swap: moves preempted requests' pages, in ``device_thread``.
            rules: tokenizer and bounds of the output.
            receiver: takes in each prompt's K and V.
            device_thread: perhaps shared with a prefill engine.
        """
        self._worker_id = worker_id
        self._scheduler = scheduler
        self._runner = runner
        self._swap = swap
        self._rules = rules
        self._receiver = receiver
        self._device_thread = device_thread
        self._lives: dict[DecodeSequence, _Life] = {}
        self._wake = asyncio.Event()
        self._leaving: asyncio.Queue[tuple[DecodeSequence, Reservation]] = asyncio.Queue()

    def status(self) -> WorkerStatus:
        """Counts as of now."""
        return WorkerStatus(
            pages_used=self._scheduler.pages_used,
            pages_cached=self._scheduler.pages_cached,
            pages_swapped=self._scheduler.pages_swapped,
            preemptions=self._scheduler.num_preemptions,
            running=self._scheduler.num_running,
            queued=self._scheduler.num_queued,
            transfers_pending=self._receiver.pending,
            graph=self._runner.graph_summary,
        )

    async def run(self) -> None:
        """Step until cancelled; an error that concerns no single request ends it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._step_all(), name=f"{self._worker_id}/step")
            while True:  # those that left before their transfer was quiet
                sequence, reservation = await self._leaving.get()
                name = f"{sequence.request.request_id}/release"
                tasks.create_task(self._drop_after_transfer(sequence, reservation), name=name)

    async def decode(self, request: GenerateRequest) -> AsyncGenerator[Reserved | OutputChunk]:
        """First `Reserved`, then chunks; the last one has a finish reason.

        Raises:
            RequestTooLong: the request can never fit.
            RequestError: another live request has its room.
            Overloaded: the queue is full.
            TransferError: the prompt's K and V did not arrive.
            WorkerError: the model failed.
        """
        if any(sequence.request.room == request.room for sequence in self._lives):
            raise RequestError("room", f"{request.room} is in use")
        sequence = self._scheduler.add(request)
        life = self._lives[sequence] = _Life(Outbox(self._rules.max_unread_chunks))
        try:
            self._admit()
            self._wake.set()  # somebody paused may leave for it
            await life.admitted.wait()
            life.reservation = self._reserve(sequence)
            yield Reserved(target=life.reservation.target, cached_pages=sequence.cached_pages)
            handover = await life.reservation.wait()
            await life.reservation.release()
            life.reservation = None
            self._begin(sequence, life, handover)
            finished = False
            while not finished:
                chunk = await life.outbox.take()
                self._resume(sequence)
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            self._leave(sequence, life)

    def _reserve(self, sequence: DecodeSequence) -> Reservation:
        prompt_tokens = len(sequence.request.token_ids)
        return self._receiver.reserve(
            sequence.request.request_id,
            sequence.request.room,
            sequence.page_ids[: self._scheduler.num_pages(prompt_tokens)],
            prompt_tokens,
            first_page=sequence.cached_pages,
        )

    def _begin(self, sequence: DecodeSequence, life: _Life, handover: Handover) -> None:
        """The first token goes the way of every other one."""
        request, tokenizer = sequence.request, self._rules.tokenizer
        token = handover.first_token
        if handover.prompt_tokens != len(request.token_ids):
            raise TransferCorrupt(
                request.request_id,
                f"prefill computed {handover.prompt_tokens} of {len(request.token_ids)} tokens",
            )
        if not 0 <= token.token_id < self._rules.vocab_size:
            raise TransferCorrupt(request.request_id, f"no token has the id {token.token_id}")
        life.sampler = SequenceSampler(
            request.sampling,
            request.stop,
            request.token_ids,
            tokenizer.eos_token_ids,
            self._rules.vocab_size,
        )
        life.output = OutputStream(
            request.stop,
            tokenizer.eos_token_ids,
            tokenizer.stream(),
            self._rules.max_context_tokens,
            len(request.token_ids),
        )
        self._scheduler.start(sequence, token.token_id)
        self._deliver(sequence, life, token)
        self._wake.set()

    def _deliver(self, sequence: DecodeSequence, life: _Life, token: SampledToken) -> None:
        assert life.output is not None
        assert life.sampler is not None
        life.sampler.observe(token.token_id)
        life.outbox.put(life.output.push(token))
        if life.output.finished:
            self._drop(sequence)  # before the caller hears of the end
        elif life.outbox.full:
            self._scheduler.pause(sequence)

    def _resume(self, sequence: DecodeSequence) -> None:
        if sequence.paused:
            self._scheduler.resume(sequence)
            self._wake.set()

    def _admit(self) -> None:
        for sequence in self._scheduler.admit():
            self._lives[sequence].admitted.set()

    def _leave(self, sequence: DecodeSequence, life: _Life) -> None:
        """The request's coroutine ends, for whatever reason."""
        if life.reservation is None:
            self._drop(sequence)
        else:
            self._leaving.put_nowait((sequence, life.reservation))

    async def _drop_after_transfer(
        self, sequence: DecodeSequence, reservation: Reservation
    ) -> None:
        await reservation.release()
        self._drop(sequence)

    def _drop(self, sequence: DecodeSequence, *, keep: bool = True) -> None:
        self._scheduler.drop(sequence, keep=keep)
        self._lives.pop(sequence, None)
        self._admit()  # others may have waited for these pages
        self._wake.set()

    async def _step_all(self) -> None:
        while True:
            plan = self._scheduler.plan()
            if plan.leaving is not None:
                await self._save(plan.leaving)
            elif plan.returning is not None:
                await self._load(plan.returning)
            elif plan.rows:
                await self._step(plan.rows)
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _save(self, sequence: DecodeSequence) -> None:
        life, page_ids = self._lives[sequence], sequence.page_ids
        done = await self._device_thread.run(lambda: self._swap.save(page_ids))
        error = done.exception()
        if self._scheduler.end_save(sequence, saved=error is None):
            life.saved = done.result()
            logger.debug(
                "request_id=%s worker=%s preempted, pages=%d",
                *(sequence.request.request_id, self._worker_id, len(page_ids)),
            )
        if error is not None:
            self._fail([sequence], [life], error)
        self._admit()

    async def _load(self, sequence: DecodeSequence) -> None:
        life, page_ids = self._lives[sequence], sequence.page_ids
        saved, life.saved = life.saved, None
        assert saved is not None
        done = await self._device_thread.run(lambda: self._swap.load(saved, page_ids))
        error = done.exception()
        self._scheduler.end_load(sequence, loaded=error is None)
        if error is not None:
            self._fail([sequence], [life], error)
        self._admit()

    async def _step(self, rows: Sequence[DecodeSequence]) -> None:
        lives = [self._lives[sequence] for sequence in rows]
        samplers = [life.sampler for life in lives if life.sampler is not None]
        inputs = [
            DecodeRow(
                token_id=sequence.token_id,
                position=sequence.position,
                page_ids=sequence.page_ids,
            )
            for sequence in rows
        ]
        done = await self._device_thread.run(lambda: sample(self._runner.step(inputs), samplers))
        error = done.exception()
        if error is not None:
            self._scheduler.end_step(rows, None)
            self._fail(rows, lives, error)
            return
        tokens = done.result()
        self._scheduler.end_step(rows, [token.token_id for token in tokens])
        for sequence, life, token in zip(rows, lives, tokens, strict=True):
            if sequence in self._lives:
                self._deliver(sequence, life, token)
        self._admit()

    def _fail(
        self, rows: Sequence[DecodeSequence], lives: Sequence[_Life], error: BaseException
    ) -> None:
        """The device failed: so do the requests it worked on, and nobody else."""
        logger.error(
            "worker=%s a decode step failed requests=%s",
            self._worker_id,
            ",".join(sequence.request.request_id for sequence in rows),
            exc_info=error,
        )
        for sequence, life in zip(rows, lives, strict=True):
            self._drop(sequence, keep=False)
            life.outbox.fail(
                WorkerError(
                    self._worker_id, f"the decode step failed: {type(error).__name__}: {error}"
                )
            )
        self._admit()
