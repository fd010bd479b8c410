"""One table from the error tree to gRPC codes, and the way back.

A failing call carries the error itself in trailing metadata, as msgpack ``[class, arguments]``
under ``tandem-error-bin``, so that the caller of a worker raises what the worker raised. An error
without it, from gRPC itself or from a peer that is gone, is mapped by its code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
import msgpack

from tandem import errors
from tandem.errors import (
    ConfigError,
    DeadlineExceeded,
    LayoutMismatch,
    Overloaded,
    RequestCancelled,
    RequestError,
    ServingError,
    TransferCorrupt,
    TransferError,
    WeightsError,
    WorkerError,
    WorkerLost,
)

ERROR_KEY = "tandem-error-bin"
RETRY_AFTER_KEY = "retry-after-s"

CODES: dict[type[ServingError], grpc.StatusCode] = {
    ServingError: grpc.StatusCode.INTERNAL,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    RequestCancelled: grpc.StatusCode.CANCELLED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TransferError: grpc.StatusCode.UNAVAILABLE,
    TransferCorrupt: grpc.StatusCode.DATA_LOSS,
    LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    WorkerError: grpc.StatusCode.INTERNAL,
    WorkerLost: grpc.StatusCode.UNAVAILABLE,
    WeightsError: grpc.StatusCode.FAILED_PRECONDITION,
}
"""The code of each error; a class that is not listed takes that of its nearest base.

DATA_LOSS and not INTERNAL for corrupt transfers: the bytes are gone, the worker is well.
"""

_MAX_FIELD_CHARS = 200  # clients refuse trailers above 8 KiB in all, and escapes triple a byte
_MAX_DETAILS_CHARS = 300
_MAX_PAYLOAD_BYTES = 4096

_Build = Callable[..., ServingError]
_CLASSES: dict[str, type[ServingError]] = {
    name: member
    for name, member in vars(errors).items()
    if inspect.isclass(member) and issubclass(member, ServingError)
}
_FIELD_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "float": (float, int)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RpcStatus:
    """How a failed call ends."""

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, str | bytes], ...]


def code_of(error: ServingError) -> grpc.StatusCode:
    """The gRPC code of ``error``: that of the nearest class in `CODES`."""
    return next(CODES[base] for base in type(error).__mro__ if base in CODES)


def status_of(error: ServingError) -> RpcStatus:
    """Everything a call that failed with ``error`` ends with; sizes are bounded."""
    metadata: list[tuple[str, str | bytes]] = [(ERROR_KEY, _pack(error))]
    if isinstance(error, Overloaded):
        metadata.append((RETRY_AFTER_KEY, f"{error.retry_after_s:g}"))
    return RpcStatus(
        code=code_of(error),
        details=_shorten(str(error), _MAX_DETAILS_CHARS),
        metadata=tuple(metadata),
    )


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServingError) -> NoReturn:
    """End the call with ``error``; does not return."""
    status = status_of(error)
    await context.abort(status.code, status.details, status.metadata)
    raise AssertionError("abort returned")


def error_from_rpc(
    failure: grpc.aio.AioRpcError, *, worker_id: str = "", request_id: str = ""
) -> ServingError:
    """What a call that ended with ``failure`` would have raised in this process.

    Args:
        failure: as the stub raised it.
        worker_id: who was called, for errors that carry no better name.
        request_id: on whose behalf, likewise.
    """
    carried = _unpack(failure.trailing_metadata() or ())
    if carried is not None:
        return carried
    details = failure.details() or failure.code().name
    match failure.code():
        case grpc.StatusCode.UNAVAILABLE:
            return WorkerLost(worker_id, details)
        case grpc.StatusCode.CANCELLED:
            return RequestCancelled(request_id, details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(request_id, details)
        case code:
            return WorkerError(worker_id, f"{code.name}: {details}")


def retry_after_s(metadata: Iterable[tuple[str, str | bytes]]) -> float | None:
    """The retry delay in ``metadata``, or None when there is none."""
    for key, value in metadata:
        if key == RETRY_AFTER_KEY:
            try:
                return float(value)
            except ValueError:
                return None
    return None


def _shorten(text: str, room: int = _MAX_FIELD_CHARS) -> str:
    return text if len(text) <= room else text[: room - 3] + "..."


def _pack(error: ServingError) -> bytes:
    arguments = [_shorten(value) if isinstance(value, str) else value for value in error.args]
    name = next(base.__name__ for base in type(error).__mro__ if base.__name__ in _CLASSES)
    packed = msgpack.packb([name, arguments], unicode_errors="replace")
    assert isinstance(packed, bytes)
    assert len(packed) <= _MAX_PAYLOAD_BYTES, f"{name} carries {len(packed)} bytes"
    return packed


def _unpack(metadata: Iterable[tuple[str, str | bytes]]) -> ServingError | None:
    for key, value in metadata:
        if key != ERROR_KEY or not isinstance(value, bytes) or len(value) > _MAX_PAYLOAD_BYTES:
            continue
        try:
            name, arguments = msgpack.unpackb(value)
        except (ValueError, TypeError, msgpack.UnpackException):
            return None
        return _build(name, arguments)
    return None


def _build(name: object, arguments: object) -> ServingError | None:
    if not isinstance(name, str) or not isinstance(arguments, list) or name not in _CLASSES:
        return None
    build: _Build = _CLASSES[name]
    if build is ServingError:  # takes whatever Exception takes
        return build(*arguments) if all(isinstance(value, str) for value in arguments) else None
    fields = inspect.signature(build).parameters.values()
    if len(arguments) != len(fields):
        return None
    for field, value in zip(fields, arguments, strict=True):
        if not isinstance(value, _FIELD_TYPES[field.annotation]) or isinstance(value, bool):
            return None
    return build(*arguments)
