from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import msgpack
import pytest

from tandem import errors
from tandem.errorcodes import (
    CODES,
    ERROR_KEY,
    abort,
    code_of,
    error_from_rpc,
    retry_after_s,
    status_of,
)
from tandem.errors import ServingError
from tandem.testing.errors import EXAMPLES


def failure(
    code: grpc.StatusCode, details: str, *trailing: tuple[str, str | bytes]
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details
    )


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_every_error_comes_back_as_it_was(error: ServingError) -> None:
    status = status_of(error)
    back = error_from_rpc(failure(status.code, status.details, *status.metadata))
    assert type(back) is type(error)
    assert back.args == error.args
    assert str(back) == str(error)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RequestTooLong("token_ids", "too long"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.Overloaded("queue", 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.WorkerLost("d", "gone"), grpc.StatusCode.UNAVAILABLE),
        (errors.PeerLost("r", "gone"), grpc.StatusCode.UNAVAILABLE),
        (errors.TransferTimeout("r", "silent"), grpc.StatusCode.UNAVAILABLE),
        (errors.TransferAborted("r", "given up"), grpc.StatusCode.UNAVAILABLE),
        (errors.TransferCorrupt("r", "checksum"), grpc.StatusCode.DATA_LOSS),
        (errors.LayoutMismatch("dtype", "a", "b"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.RequestCancelled("r", "asked"), grpc.StatusCode.CANCELLED),
        (errors.DeadlineExceeded("r", "late"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.WorkerError("d", "broke"), grpc.StatusCode.INTERNAL),
        (errors.ServingError("?"), grpc.StatusCode.INTERNAL),
    ],
)
def test_codes(error: ServingError, code: grpc.StatusCode) -> None:
    assert code_of(error) is code


def test_every_class_has_a_code_by_inheritance() -> None:
    assert CODES[ServingError] is grpc.StatusCode.INTERNAL
    assert all(code_of(error) is not grpc.StatusCode.OK for error in EXAMPLES)


def test_subclass_from_outside_travels_as_its_nearest_known_base() -> None:
    class Special(errors.WorkerError):
        pass

    status = status_of(Special("w", "x"))
    assert type(error_from_rpc(failure(status.code, "", *status.metadata))) is errors.WorkerError


def test_overload_names_its_delay() -> None:
    status = status_of(errors.Overloaded("queue is full", 2.5))
    assert retry_after_s(status.metadata) == 2.5
    assert retry_after_s([("retry-after-s", "soon")]) is None
    assert retry_after_s([]) is None


def test_sizes_are_bounded() -> None:
    status = status_of(errors.LayoutMismatch("\U0001f600" * 9999, "b" * 9999, "c" * 9999))
    wire = 3 * len(status.details.encode()) + sum(
        len(key) + len(value) * 4 // 3 for key, value in status.metadata
    )
    assert wire < 8192
    back = error_from_rpc(failure(status.code, status.details, *status.metadata))
    assert isinstance(back, errors.LayoutMismatch)
    assert back.ours.endswith("...")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.WorkerLost),
        (grpc.StatusCode.CANCELLED, errors.RequestCancelled),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.WorkerError),
        (grpc.StatusCode.UNAUTHENTICATED, errors.WorkerError),
    ],
)
def test_bare_codes(code: grpc.StatusCode, expected: type[ServingError]) -> None:
    back = error_from_rpc(failure(code, "why"), worker_id="decode-1", request_id="r9")
    assert type(back) is expected
    assert "why" in str(back)
    assert "decode-1" in str(back) or "r9" in str(back)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb("WorkerLost"),
        msgpack.packb(["WorkerLost", ["w"]]),
        msgpack.packb(["WorkerLost", ["w", 3]]),
        msgpack.packb(["Overloaded", ["w", "soon"]]),
        msgpack.packb(["Overloaded", ["w", True]]),
        msgpack.packb(["ServingError", [1]]),
        msgpack.packb(["SystemExit", [1]]),
        msgpack.packb([["x"], []]),
        msgpack.packb(["WorkerLost", ["w", "x" * 9000]]),
    ],
)
def test_malformed_payloads_fall_back_to_the_code(payload: bytes) -> None:
    back = error_from_rpc(
        failure(grpc.StatusCode.UNAVAILABLE, "reset", (ERROR_KEY, payload)), worker_id="w"
    )
    assert back.args == ("w", "reset")


def test_errors_cross_a_real_call() -> None:
    raised = errors.TransferCorrupt("r-\u4f60\u597d", "layer 3: line\nbreak")

    async def handler(_request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await abort(context, raised)

    async def scenario() -> ServingError:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "t.T", {"Fail": grpc.unary_unary_rpc_method_handler(handler)}
                ),
            )
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                call: Any = channel.unary_unary("/t.T/Fail")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"")
                return error_from_rpc(caught.value)
        finally:
            await server.stop(None)

    back = asyncio.run(scenario())
    assert type(back) is errors.TransferCorrupt
    assert back.args == raised.args
