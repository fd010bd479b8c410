"""Settings that say `auto` or 0, and those that depend on one another, made concrete."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tandem.config.rules import check_together
from tandem.config.tree import TandemConfig
from tandem.errors import ConfigError
from tandem.models.spec import ModelSpec

_AUTO_CONTEXTS = 2
_AUTO_MEMORY_SHARE = 0.5  # the rest is for weights, activations and the page cache
_MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """What a worker runs with: no `auto` left."""

    dtype: Literal["float32", "bfloat16"]
    """Precision of weights, K and V."""
    max_context_tokens: int
    """Prompt and output together."""
    prefill_pages: int
    """Pages that prompts can hold in one prefill worker; its buffers have one more, page 0."""
    decode_pages: int
    """Pages that requests can hold in one decode worker; its buffers have one more, page 0."""
    prefill_threads: int
    decode_threads: int


def resolve(
    config: TandemConfig, spec: ModelSpec, cores: int, available_memory_bytes: int
) -> ResolvedConfig:
    """Make ``config`` concrete for one model on one machine.

    Args:
        config: as written.
        spec: the model that will be loaded.
        cores: cores that this machine's workers share.
        available_memory_bytes: memory that they share.

    Returns:
        The concrete settings.

    Raises:
        ConfigError: settings contradict one another or the model, or the pages do not fit.
    """
    check_together(config)
    dtype: Literal["float32", "bfloat16"] = (
        "float32" if config.model.dtype == "auto" else config.model.dtype
    )
    context = _context(config, spec)
    token_bytes = sum(group.nbytes(1) for group in spec.cache_groups(1, dtype))
    memory = _Memory(
        available_bytes=available_memory_bytes,
        pools=config.prefill.replicas + config.decode.replicas,
        token_bytes=token_bytes,
        context_tokens=context,
    )
    return ResolvedConfig(
        dtype=dtype,
        max_context_tokens=context,
        prefill_pages=memory.pages(
            "prefill.num_pages", config.prefill.num_pages, config.prefill_page_tokens
        ),
        decode_pages=memory.pages(
            "decode.num_pages", config.decode.num_pages, config.decode_page_tokens
        ),
        prefill_threads=config.prefill.threads or max(1, cores // workers_of(config)),
        decode_threads=config.decode.threads or max(1, cores // workers_of(config)),
    )


def workers_of(config: TandemConfig) -> int:
    """Worker processes that ``config`` asks for: a colocated one does both phases."""
    if config.mode == "colocated":
        return config.decode.replicas
    return config.prefill.replicas + config.decode.replicas


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Memory that can be had without swapping, as the kernel and this container's limit see it."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":", 1) for line in lines)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


@dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    available_bytes: int
    pools: int
    token_bytes: int
    context_tokens: int

    def pages(self, field: str, asked: int, page_tokens: int) -> int:
        page_bytes = page_tokens * self.token_bytes
        if asked:
            if (asked + 1) * page_bytes > self.available_bytes:
                raise ConfigError(
                    field,
                    f"{asked} pages of K and V take {_mib((asked + 1) * page_bytes)}, but only "
                    f"{_mib(self.available_bytes)} are available; set fewer",
                )
            return asked
        share = int(self.available_bytes * _AUTO_MEMORY_SHARE) // self.pools
        fitting = share // page_bytes - 1
        context_pages = -(-self.context_tokens // page_tokens)
        if fitting < context_pages:
            raise ConfigError(
                field,
                f"one whole context takes {_mib((context_pages + 1) * page_bytes)} of K and V, but "
                f"only {_mib(share)} are there for each of {self.pools} pools (half of the "
                f"{_mib(self.available_bytes)} available); set a smaller model.max_context_tokens",
            )
        return min(_AUTO_CONTEXTS * context_pages, fitting)


def _context(config: TandemConfig, spec: ModelSpec) -> int:
    asked = config.model.max_context_tokens
    if asked > spec.max_context_tokens:
        raise ConfigError(
            "model.max_context_tokens",
            f"{asked} is above the model's own limit of {spec.max_context_tokens}",
        )
    context = asked or spec.max_context_tokens
    if context < 2:
        raise ConfigError("model.max_context_tokens", f"{context} leaves no room for an answer")
    return context


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:.1f} MiB"
