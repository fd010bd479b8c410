"""Sizes and places in a group's buffer."""

from __future__ import annotations

import pytest

from tandem.cache.groups import ITEM_BYTES, CacheDtype, CacheGroup


def make_group(dtype: CacheDtype, token_shape: tuple[int, ...]) -> CacheGroup:
    return CacheGroup(name="k", num_layers=3, page_tokens=16, token_shape=token_shape, dtype=dtype)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("token_shape", [(3, 64), (576,), (1, 5, 7), ()])
def test_places_tile_the_buffer(dtype: CacheDtype, token_shape: tuple[int, ...]) -> None:
    group = make_group(dtype, token_shape)
    offsets = [
        group.page_offset_bytes(layer, page, num_pages=5) for layer in range(3) for page in range(5)
    ]
    assert offsets == list(range(0, group.nbytes(5), group.page_bytes))
    assert len(offsets) == 15


def test_bytes_of_a_page() -> None:
    assert make_group("float32", (3, 64)).page_bytes == 16 * 3 * 64 * 4
    assert make_group("bfloat16", (576,)).page_bytes == 16 * 576 * 2
    assert make_group("int8", ()).page_bytes == 16
