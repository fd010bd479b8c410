"""One prompt's pages on their way to decode.

States: open -> (all layers sent) finished -> committed; open | finished -> failed. A stream that
ended is quiet once no thread and no peer reads its source pages any more; then `wait` answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kv_transfer.counters import TransferStats
from kv_transfer.messages import Commit, KVTarget, Message, encode, encode_handover
from kv_transfer.outcome import Outcome
from kv_transfer.pieces import Piece, cut_layer
from kv_transfer.transport import OutFrame
from kv_transfer.wire import FrameType, Header
from tandem.cache.groups import CacheGroup
from tandem.errors import TransferAborted, TransferError
from tandem.requests import Handover

if TYPE_CHECKING:
    from kv_transfer.link import Link


class KVStream:
    """Made by `kv_transfer.sender.KVSender.open`. All methods are thread-safe.

    Whoever opened it calls `finish` or `abort`, and then `wait`, in every case: only when `wait`
    has answered may the source pages be freed.
    """

    def __init__(
        self,
        link: Link,
        target: KVTarget,
        request_id: str,
        groups: Sequence[CacheGroup],
        *,
        clock: Callable[[], float],
    ) -> None:
        target = link.paging.target(target, link.paging.their_ratio)
        self.request_id = request_id
        self.key = (target.room, target.epoch)
        self.first_page = target.first_page
        """Pages before this one are already with decode; they are not sent."""
        self.num_pages = target.num_pages
        self._link = link
        self._groups = groups
        self._pull = link.pull
        self._clock = clock
        self._opened_s = clock()
        self._pages_by_layer = [0] * max(group.num_layers for group in groups)
        self._frames = self._bytes = self._early_bytes = 0
        self._finished = False
        self._error: TransferError | None = None
        self._duration_s = 0.0
        self._writing = 0
        self._unacked_frames = 0
        self._quiet: Outcome[TransferStats] = Outcome()
        self.ended = False
        """Committed or failed."""
        self.committing = False
        """The commit is on its way: no other terminal frame may follow."""

    def send_layer(self, layer: int, page_ids: Sequence[int], first_page: int) -> None:
        """Queue one layer's K and V pages; returns at once, copies nothing.

        Call it when the layer's keys and values are in the pages, and leave those pages alone
        until `wait` answers.

        Args:
            layer: which layer.
            page_ids: in our pool, consecutive pages of the prompt.
            first_page: position of the first of them in the prompt.

        Raises:
            TransferError: the stream has failed, or the pages are not the reservation's.
        """
        page_ids, first_page = self._link.paging.sent(page_ids, first_page, self.num_pages)
        skipped = max(0, self.first_page - first_page)
        ids, first = page_ids[skipped:], first_page + skipped
        if not 0 <= layer < len(self._pages_by_layer) or first_page < 0:
            raise TransferError(self.request_id, f"no layer {layer} or page {first_page}")
        if ids and first + len(ids) > self.num_pages:
            raise TransferError(
                self.request_id,
                f"page {first + len(ids) - 1} of layer {layer} is outside the "
                f"{self.num_pages} reserved",
            )
        with self._link.lock:
            self._check_open()
            self._pages_by_layer[layer] += len(ids)
            for piece in cut_layer(self._groups, layer, ids, first, self._link.frame_bytes):
                self._link.enqueue(self, piece)

    def finish(self, handover: Handover) -> None:
        """Queue the commit behind all layers.

        Raises:
            TransferError: the stream has failed.
        """
        commit = Commit(
            pages_by_layer=tuple(self._pages_by_layer), handover=encode_handover(handover)
        )
        with self._link.lock:
            self._check_open()
            self._finished = True
            self._early_bytes = self._bytes
            self._link.enqueue(self, self.control(FrameType.COMMIT, commit))

    def abort(self, reason: str) -> None:
        """Give the transfer up; does nothing when it has already ended."""
        with self._link.lock:
            self._link.abort(self, TransferAborted(self.request_id, reason), tell=True)

    async def wait(self) -> TransferStats:
        """Return when the receiver has acknowledged the commit.

        When this returns or raises a `TransferError`, nothing reads the source pages any more, or
        nothing that is read of them can be served. A cancelled wait says nothing: abort, and wait
        again.

        Raises:
            TransferError: the transfer did not complete.
        """
        return await self._quiet.wait()

    @property
    def quiet(self) -> bool:
        """Whether the stream has ended and nothing reads its source pages any more."""
        return self._quiet.done

    def control(self, kind: FrameType, message: Message) -> OutFrame:
        """Make a control frame of this stream."""
        header = Header(type=kind, room=self.key[0], epoch=self.key[1])
        return OutFrame(header=header, body=encode(message))

    def taken(self, what: Piece | OutFrame) -> None:
        """The writer thread took a queued item; lock held."""
        self._writing += 1
        if isinstance(what, Piece):
            self._unacked_frames += 1
        elif what.header.type is FrameType.COMMIT:
            self.committing = True

    def written(self, what: Piece | OutFrame) -> None:
        """The writer thread let go of a queued item; lock held."""
        self._writing -= 1
        if isinstance(what, Piece):
            self._frames += 1
            self._bytes += what.nbytes
        self._answer_when_quiet()

    def acknowledged(self) -> None:
        """The peer no longer reads the oldest frame's source; lock held."""
        self._unacked_frames -= 1
        self._answer_when_quiet()

    def settle(self, error: TransferError | None) -> None:
        """Record how the stream ended; once; lock held."""
        assert not self.ended
        self.ended = True
        self._error = error
        self._duration_s = self._clock() - self._opened_s
        self._answer_when_quiet()

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._finished:
            raise TransferError(self.request_id, "the stream is already finished")

    def _answer_when_quiet(self) -> None:
        if not self.ended or self._writing or (self._pull and self._unacked_frames):
            return
        if self._error is not None:
            self._quiet.fail(self._error)
            return
        self._quiet.succeed(
            TransferStats(
                transport=self._link.transport,
                frames=self._frames,
                nbytes=self._bytes,
                early_bytes=self._early_bytes,
                duration_s=self._duration_s,
            )
        )
