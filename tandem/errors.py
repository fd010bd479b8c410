"""Every error that Tandem raises on purpose.

    ServingError
    |-- ConfigError                 a setting is unknown, of the wrong type or impossible
    |-- RequestError                the caller's request cannot be served as written
    |   `-- RequestTooLong          it can never fit the context or the K/V pool
    |-- RequestEnded                the request stopped before it finished
    |   |-- RequestCancelled        somebody asked for it to stop
    |   `-- DeadlineExceeded        its deadline passed
    |-- Overloaded                  a bounded queue is full; try again later
    |-- TransferError               K and V did not arrive
    |   |-- PeerLost                the other end of the K/V connection is gone
    |   |-- TransferTimeout         the other end is silent
    |   |-- TransferAborted         one end gave the transfer up
    |   |-- TransferCorrupt         bytes or counts differ from what the sender declared
    |   `-- LayoutMismatch          the two ends keep their caches differently
    |-- WorkerError                 a worker failed
    |   `-- WorkerLost              no live worker, or it died while it worked
    `-- WeightsError                a model's files cannot be used
        |-- MissingTensor
        |-- ShapeMismatch
        `-- TokenizerError

Every field goes through ``super().__init__``: Ray carries exceptions between processes by pickling
``args``.
"""

from __future__ import annotations


class ServingError(Exception):
    """Root of the tree."""

    retryable: bool = False
    """Whether the same request may succeed on another worker or a moment later."""


class ConfigError(ServingError):
    """Setting ``field`` is wrong; ``problem`` says how and what would be right."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class RequestError(ServingError):
    """Request field ``field`` is wrong; ``problem`` says how and what would be right."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class RequestTooLong(RequestError):
    """The request can never fit, however long it waits."""


class RequestEnded(ServingError):
    """Request ``request_id`` stopped early because of ``reason``."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(request_id, reason)
        self.request_id = request_id
        self.reason = reason

    def __str__(self) -> str:
        return f"request {self.request_id}: {self.reason}"


class RequestCancelled(RequestEnded):
    """Somebody asked for the request to stop."""


class DeadlineExceeded(RequestEnded):
    """The request's deadline passed."""


class Overloaded(ServingError):
    """A bounded queue is full; come back in ``retry_after_s`` seconds."""

    retryable = True

    def __init__(self, what: str, retry_after_s: float) -> None:
        super().__init__(what, retry_after_s)
        self.what = what
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.what}; retry in {self.retry_after_s:g} s"


class TransferError(ServingError):
    """K and V of request ``request_id`` did not arrive: ``reason``."""

    retryable = True

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(request_id, reason)
        self.request_id = request_id
        self.reason = reason

    def __str__(self) -> str:
        return f"K/V transfer of request {self.request_id}: {self.reason}"


class PeerLost(TransferError):
    """The other end of the K/V connection is gone."""


class TransferTimeout(TransferError):
    """The other end of the K/V connection is silent."""


class TransferAborted(TransferError):
    """One end gave the transfer up."""


class TransferCorrupt(TransferError):
    """The bytes or counts that arrived are not those the sender declared."""


class LayoutMismatch(TransferError):
    """Both ends of a K/V connection must agree on ``field``; they hold ``ours`` and ``theirs``."""

    retryable = False

    def __init__(self, field: str, ours: str, theirs: str) -> None:
        ServingError.__init__(self, field, ours, theirs)
        self.request_id = ""
        self.field = field
        self.ours = ours
        self.theirs = theirs
        self.reason = f"{field} differs: here {ours}, there {theirs}"

    def __str__(self) -> str:
        return f"K/V peers are incompatible: {self.reason}"


class WorkerError(ServingError):
    """Worker ``worker_id`` failed: ``reason``."""

    def __init__(self, worker_id: str, reason: str) -> None:
        super().__init__(worker_id, reason)
        self.worker_id = worker_id
        self.reason = reason

    def __str__(self) -> str:
        return f"worker {self.worker_id}: {self.reason}"


class WorkerLost(WorkerError):
    """The worker is not there (any more)."""

    retryable = True


class WeightsError(ServingError):
    """``file`` of a model cannot be used: ``problem``."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(file, problem)
        self.file = file
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


class MissingTensor(WeightsError):
    """A tensor the architecture needs is not in the checkpoint."""


class ShapeMismatch(WeightsError):
    """A tensor has another shape than the configuration says."""


class TokenizerError(WeightsError):
    """The tokenizer's files cannot be used."""
