"""Pages that a decode worker holds ready for one prompt.

States: reserved -> open (a connection claimed it) -> landed | failed; then released. Pages belong
to the transfer until it lands or fails, and to whoever reserved them from then on, as soon as the
fence is quiet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.fence import Fence
from kv_transfer.messages import Commit, KVTarget, decode_handover, encode
from kv_transfer.outcome import Outcome
from kv_transfer.paging import Paging
from kv_transfer.wire import Header, WireError
from tandem.cache.groups import CacheGroup
from tandem.errors import TransferAborted, TransferCorrupt, TransferError
from tandem.requests import Handover


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What was reserved."""

    request_id: str
    target: KVTarget
    page_ids: tuple[int, ...]
    expires_s: float


Dismiss = Callable[["Reservation", TransferError | None], None]
"""Told how a reservation ended."""


class Reservation:
    """Made by `kv_transfer.receiver.KVReceiver.reserve`.

    Whoever made it awaits `release` in every case, and frees the pages only after that.
    """

    def __init__(
        self,
        terms: Terms,
        groups: Sequence[CacheGroup],
        on_end: Dismiss,
    ) -> None:
        self.request_id = terms.request_id
        self.terms = terms
        self.target = encode(terms.target)
        """Tells a prefill worker where the pages are; opaque to everybody else."""
        self.fence = Fence()
        """Admits placements into the pages."""
        self._target, self._page_ids = terms.target, terms.page_ids
        self._groups = groups
        self._on_end = on_end
        self._lock = threading.Lock()
        self._landed = [[0] * group.num_layers for group in groups]  # a bit for each page
        self._received = [[0] * group.num_layers for group in groups]  # repeats count
        self._layers: dict[int, Outcome[None]] = {}
        self._outcome: Outcome[Handover] = Outcome()
        self._dismiss: Dismiss | None = None

    @property
    def key(self) -> tuple[int, int]:
        """(room, epoch)."""
        return self.terms.target.room, self.terms.target.epoch

    async def wait(self) -> Handover:
        """Return when every page has landed and was verified.

        Raises:
            PeerLost: the prefill worker's connection ended.
            TransferTimeout: it fell silent, or the lease ran out.
            TransferAborted: either side gave up.
            TransferCorrupt: bytes or counts differ from what was sent.
        """
        return await self._outcome.wait()

    async def wait_layer(self, layer: int) -> None:
        """Return when all pages of ``layer`` have landed; raises what `wait` would."""
        with self._lock:
            landed = self._layers.setdefault(layer, Outcome())
            if error := self._outcome.error:
                landed.fail(error)
            elif self._complete(layer):
                landed.succeed(None)
        await landed.wait()

    async def release(self) -> None:
        """Return when nothing can be placed into the pages any more; idempotent."""
        self.end(TransferAborted(self.request_id, "decode released the reservation"))
        await self.fence.quiet()

    def claim(self, dismiss: Dismiss, paging: Paging) -> bool:
        """A connection will fill the pages; False when it ended or another one does.

        Args:
            dismiss: called once, when the transfer ends.
            paging: the pages in which it will fill ours.
        """
        with self._lock:
            if self._dismiss is not None or self._outcome.done:
                return False
            self._dismiss = dismiss
            self._target = paging.target(self.terms.target, paging.ratio)
            self._page_ids = paging.ids(self.terms.page_ids)
            return True

    def check_range(self, header: Header) -> str:
        """Say what is wrong with a frame's page range, or return an empty string."""
        target = self._target
        if header.first_page < target.first_page:
            return f"page {header.first_page} is below the first that is missing"
        if header.first_page + header.num_pages > target.num_pages:
            return f"page {header.first_page + header.num_pages - 1} is beyond the reservation"
        return ""

    def destination(self, header: Header) -> tuple[int, ...]:
        """Our page ids for a frame whose range was checked, in pages that travel."""
        return self._page_ids[header.first_page : header.first_page + header.num_pages]

    def landed(self, header: Header) -> None:
        """Record verified pages."""
        pages = ((1 << header.num_pages) - 1) << header.first_page
        with self._lock:
            self._landed[header.group][header.layer] |= pages
            self._received[header.group][header.layer] += header.num_pages
            waiting = self._layers.get(header.layer)
            if waiting is not None and self._complete(header.layer):
                waiting.succeed(None)

    def commit(self, commit: Commit) -> None:
        """End the transfer well if all pages landed as the manifest says, else as corrupt."""
        try:
            handover = decode_handover(commit.handover)
            problem = self._manifest_problem(commit, handover)
        except WireError as error:
            problem = str(error)
        if problem:
            self.end(TransferCorrupt(self.request_id, problem))
            return
        self.fence.close()  # the pages are decode's from here on
        with self._lock:
            ended = self._outcome.succeed(handover)
        if ended:
            self._tell(None)

    def end(self, error: TransferError) -> bool:
        """End the transfer badly, unless it has ended; closes the fence in any case."""
        self.fence.close()
        with self._lock:
            ended = self._outcome.fail(error)
            if ended:
                for waiting in self._layers.values():
                    waiting.fail(error)
        if ended:
            self._tell(error)
        return ended

    def _tell(self, error: TransferError | None) -> None:
        self._on_end(self, error)
        if self._dismiss is not None:
            self._dismiss(self, error)

    def _complete(self, layer: int) -> bool:
        target = self._target
        whole = (1 << target.num_pages) - (1 << target.first_page)
        return all(landed[layer] == whole for landed in self._landed if layer < len(landed))

    def _manifest_problem(self, commit: Commit, handover: Handover) -> str:
        target = self.terms.target
        if handover.prompt_tokens != target.num_tokens:
            return f"{handover.prompt_tokens} prompt tokens, {target.num_tokens} reserved"
        with self._lock:
            for group, received in zip(self._groups, self._received, strict=True):
                sent = list(commit.pages_by_layer[: group.num_layers])
                if sent != received:
                    return f"{group.name}: pages sent by layer {sent}, received {received}"
            for layer in range(max(group.num_layers for group in self._groups)):
                if not self._complete(layer):
                    return f"layer {layer} is not whole"
        return ""
