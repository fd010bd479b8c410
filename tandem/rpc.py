"""Options of every gRPC server and channel in a cluster, alike on all hops."""

from __future__ import annotations

from tandem.config.tree import LimitsConfig

Options = tuple[tuple[str, int], ...]

_KEEPALIVE_TIME_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
_MAX_METADATA_BYTES = 16_384


def server_options(limits: LimitsConfig) -> Options:
    """Options of a server; accepts as many pings as `channel_options` sends.

    Two servers never share a port: a second one on it is an error, not a surprise.
    """
    return (
        *_message_sizes(limits),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
    )


def channel_options(limits: LimitsConfig) -> Options:
    """Options of a channel; a peer that is silent for 15 s is lost."""
    return (
        *_message_sizes(limits),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_retries", 0),  # whether to try again is the router's decision
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", 1),
    )


def _message_sizes(limits: LimitsConfig) -> Options:
    return (
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    )
