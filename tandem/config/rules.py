"""Rules about several settings at once, for loading and for resolving."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

from tandem.config.tree import TandemConfig, TlsConfig
from tandem.errors import ConfigError


def check_together(config: TandemConfig) -> None:
    """Check what no single setting shows.

    Raises:
        ConfigError: two settings contradict one another, or a list is out of order.
    """
    _check_pages(config)
    buckets = config.decode.buckets
    if not buckets:
        raise ConfigError("decode.buckets", "is empty; name at least one batch size")
    if buckets[0] < 1 or any(low >= high for low, high in pairwise(buckets)):
        raise ConfigError("decode.buckets", f"{list(buckets)} must be positive and ascending")
    if config.mode == "colocated" and config.prefill.replicas != config.decode.replicas:
        raise ConfigError(
            "prefill.replicas",
            f"{config.prefill.replicas} differs from decode.replicas ({config.decode.replicas}); "
            "each colocated worker does both",
        )
    _check_tls(config.transfer.tls)
    if config.router.heartbeat_interval_s >= config.router.heartbeat_timeout_s:
        raise ConfigError(
            "router.heartbeat_timeout_s",
            f"{config.router.heartbeat_timeout_s:g} must be above router.heartbeat_interval_s "
            f"({config.router.heartbeat_interval_s:g})",
        )
    if config.limits.max_text_bytes >= config.limits.max_message_bytes:
        raise ConfigError(
            "limits.max_text_bytes",
            f"{config.limits.max_text_bytes} must be below limits.max_message_bytes "
            f"({config.limits.max_message_bytes})",
        )


def _check_pages(config: TandemConfig) -> None:
    prefill, decode = config.prefill_page_tokens, config.decode_page_tokens
    if max(prefill, decode) % min(prefill, decode):
        raise ConfigError(
            "decode.page_tokens",
            f"of {decode} and prefill's {prefill} neither is a multiple of the other",
        )
    if config.prefill.chunk_tokens % prefill:
        setting = "prefill.page_tokens" if config.prefill.page_tokens else "cache.page_tokens"
        raise ConfigError(
            "prefill.chunk_tokens",
            f"{config.prefill.chunk_tokens} is not a multiple of {setting} ({prefill})",
        )


def _check_tls(tls: TlsConfig) -> None:
    files = {field.name: getattr(tls, field.name) for field in fields(tls)}
    missing = [name for name, file in files.items() if not file]
    if 0 < len(missing) < len(files):
        raise ConfigError(
            f"transfer.tls.{missing[0]}",
            "is empty, but TLS needs cert_file, key_file and ca_file; name all three or none",
        )
