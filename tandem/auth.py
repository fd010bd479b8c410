"""The cluster's token: every call between router and workers carries it."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

_HEADER = "authorization"
_OPEN_SERVICES = ("/grpc.health.v1.Health/",)  # probes of the platform have no token


class ClusterToken:
    """Proof of belonging to one cluster, derived from its secret."""

    def __init__(self, secret: bytes) -> None:
        """Take the secret that the launcher drew.

        Args:
            secret: at least 16 bytes.

        Raises:
            ValueError: the secret is too short to be one.
        """
        if len(secret) < 16:
            raise ValueError(f"a cluster secret has at least 16 bytes, not {len(secret)}")
        self._value = f"Bearer {secret.hex()}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a client sends along with each call."""
        return ((_HEADER, self._value),)

    def matches(self, value: str | bytes) -> bool:
        """Whether ``value`` is this cluster's header, in constant time."""
        given = value.encode() if isinstance(value, str) else value
        return hmac.compare_digest(given, self._value.encode())


class ClusterAuth(grpc.aio.ServerInterceptor):
    """Refuses calls without the cluster's token before their handler runs; health is open."""

    def __init__(self, token: ClusterToken) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the call's own handler, or one of the same shape that refuses it."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_OPEN_SERVICES):
            return handler
        for key, value in handler_call_details.invocation_metadata or ():
            if key == _HEADER and self._token.matches(value):
                return handler
        return _refusing(handler)


async def _refuse(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "this call needs the cluster's token (authorization)"
    )


def _refusing(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(_refuse)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(_refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(_refuse)
    return grpc.unary_unary_rpc_method_handler(_refuse)
