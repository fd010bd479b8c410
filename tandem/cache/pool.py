"""The memory that K and V pages live in: one buffer per group, shared where the system can."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.cache.groups import CacheGroup

_TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PageBuffer:
    """One group's buffer as bytes, for transports.

    Page ``p`` of layer ``l`` is the ``group.page_bytes`` bytes of ``memory`` from
    ``group.page_offset_bytes(l, p, num_pages)`` on.
    """

    group: CacheGroup
    num_pages: int
    memory: memoryview
    """All bytes, writable."""
    fd: int | None
    """Anonymous shared memory behind ``memory``, or None where the system has none."""


class KVPool:
    """Zeroed page buffers for every group; page 0 takes padded rows and is never a request's."""

    def __init__(self, groups: Sequence[CacheGroup], num_pages: int) -> None:
        """Allocate and touch all pages, so that no request pays for first use.

        Raises:
            MemoryError: the system has too little memory.
        """
        self.groups = tuple(groups)
        self.num_pages = num_pages
        self.buffers = tuple(_allocate(group, num_pages) for group in self.groups)
        self._tensors = {
            buffer.group.name: torch.frombuffer(
                buffer.memory, dtype=_TORCH_DTYPES[buffer.group.dtype]
            ).view(
                buffer.group.num_layers,
                num_pages,
                buffer.group.page_tokens,
                *buffer.group.token_shape,
            )
            for buffer in self.buffers
        }

    def __getitem__(self, name: str) -> Tensor:
        """Group ``name`` as ``[num_layers, num_pages, page_tokens, *token_shape]``."""
        return self._tensors[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all groups."""
        return sum(group.nbytes(self.num_pages) for group in self.groups)


def _allocate(group: CacheGroup, num_pages: int) -> PageBuffer:
    nbytes = group.nbytes(num_pages)
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(f"tandem-{group.name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, nbytes)  # fails here, not with SIGBUS at first use
            mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            os.close(fd)
            raise MemoryError(f"cache group {group.name}: no {nbytes} bytes: {error}") from error
        # whoever still has the memory may also still hand out its descriptor
        weakref.finalize(mapping, os.close, fd).atexit = False
        return PageBuffer(group=group, num_pages=num_pages, memory=memoryview(mapping), fd=fd)
    plain = mmap.mmap(-1, nbytes)
    plain[:] = bytes(nbytes)
    return PageBuffer(group=group, num_pages=num_pages, memory=memoryview(plain), fd=None)
