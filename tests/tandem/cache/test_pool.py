"""One buffer per group: its shape, its bytes, and who may see them."""

from __future__ import annotations

import errno
import gc
import mmap
import os

import pytest
import torch

from tandem.cache.groups import ITEM_BYTES, CacheDtype, CacheGroup
from tandem.cache.pool import KVPool

K = CacheGroup(name="k", num_layers=2, page_tokens=4, token_shape=(3, 8), dtype="float32")
V = CacheGroup(name="v", num_layers=2, page_tokens=4, token_shape=(3, 5), dtype="bfloat16")

needs_memfd = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no anonymous shared files"
)


def test_groups_are_separate_zeroed_tensors() -> None:
    pool = KVPool((K, V), num_pages=6)
    assert pool["k"].shape == (2, 6, 4, 3, 8)
    assert pool["v"].shape == (2, 6, 4, 3, 5)
    assert (pool["k"].dtype, pool["v"].dtype) == (torch.float32, torch.bfloat16)
    assert pool.nbytes == pool["k"].nbytes + pool["v"].nbytes
    pool["k"].fill_(1.0)
    assert not pool["v"].any()


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_a_page_lies_where_its_group_says(dtype: CacheDtype) -> None:
    group = CacheGroup(name="ckv", num_layers=3, page_tokens=2, token_shape=(4,), dtype=dtype)
    pool = KVPool([group], num_pages=5)
    (buffer,) = pool.buffers
    pool["ckv"][1, 3].fill_(1)
    start = group.page_offset_bytes(1, 3, buffer.num_pages)
    end = start + group.page_bytes
    page = torch.frombuffer(buffer.memory[start:end], dtype=pool["ckv"].dtype)
    assert torch.equal(page, torch.ones_like(page))
    assert not any(buffer.memory[:start])
    assert not any(buffer.memory[end:])
    buffer.memory[start:end] = bytes(group.page_bytes)
    assert not pool["ckv"].any()


@needs_memfd
def test_the_descriptor_maps_the_same_memory() -> None:
    pool = KVPool([K], num_pages=3)
    (buffer,) = pool.buffers
    assert buffer.fd is not None
    assert not os.get_inheritable(buffer.fd)
    with mmap.mmap(buffer.fd, len(buffer.memory)) as theirs:
        theirs[:4] = torch.tensor([2.5]).numpy().tobytes()
    assert float(pool["k"].flatten()[0]) == 2.5


@needs_memfd
def test_the_descriptor_lives_as_long_as_the_memory() -> None:
    pool = KVPool([K], num_pages=3)
    fd, tensor = pool.buffers[0].fd, pool["k"]
    assert fd is not None
    inode = os.fstat(fd).st_ino
    del pool
    gc.collect()
    assert os.fstat(fd).st_ino == inode
    tensor.fill_(1.0)
    del tensor
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@needs_memfd
def test_too_little_memory_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def refuse(fd: int, offset: int, length: int) -> None:
        opened.append(fd)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(MemoryError, match=f"group k: no {K.nbytes(3)} bytes"):
        KVPool([K], num_pages=3)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    pool = KVPool([K], num_pages=3)
    assert pool.buffers[0].fd is None
    assert not pool["k"].any()
    pool["k"].fill_(1.0)
    assert any(pool.buffers[0].memory)
