"""Native kernels against their references, and what both promise about rows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.ops import library as ops
from tandem.ops import reference
from tandem.ops.native import load_native

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module", autouse=True)
def native() -> None:
    status = load_native()
    if not status.loaded:
        pytest.skip(f"native kernels: {status.detail}")


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 7, 16), (5, 33, 70), (40, 96, 64)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(dtype: torch.dtype, rows: int, width: int, depth: int, with_bias: bool) -> None:
    x, weight = randn(rows, depth, dtype=dtype), randn(width, depth, dtype=dtype, seed=1)
    bias = randn(width, dtype=dtype, seed=2) if with_bias else None
    close(ops.linear(x, weight, bias), reference.linear(x, weight, bias, to_float32=False))
    wide = ops.linear(x, weight, bias, to_float32=True)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(
        wide, reference.linear(x, weight, bias, to_float32=True), atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_linear_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    x, weight = randn(200, 203, dtype=dtype), randn(61, 203, dtype=dtype, seed=1)
    whole = ops.linear(x, weight)
    for rows in (*range(1, 20), 31, 32, 33, 199):
        assert torch.equal(ops.linear(x[:rows], weight), whole[:rows])
    assert torch.equal(ops.linear(x[57:58].clone(), weight), whole[57:58])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 16, 60, 576])
def test_norms_and_gate(dtype: torch.dtype, size: int) -> None:
    x, y = randn(5, size, dtype=dtype), randn(5, size, dtype=dtype, seed=1)
    weight = randn(size, dtype=dtype, seed=2)
    close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    total, normed = ops.add_rms_norm(x, y, weight, 1e-5)
    assert torch.equal(total, x + y)
    close(normed, reference.rms_norm(x + y, weight, 1e-5))
    close(ops.silu_mul(x, y), reference.silu_mul(x, y))


def test_the_gate_far_from_zero() -> None:
    gate = torch.tensor([[-1000.0, -90.0, -50.0, 0.0, 50.0, 90.0, 1000.0]])
    close(ops.silu_mul(gate, torch.ones_like(gate)), functional.silu(gate))


@dataclass
class Cache:
    """Random pages and two sequences' block table; NaN wherever nobody may read."""

    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    lengths: Tensor

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        return self.k_pages, self.v_pages


def poisoned_cache(
    lengths: list[int], page_tokens: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> Cache:
    used = [-(-length // page_tokens) for length in lengths]
    num_pages = sum(used) + 2
    k_pages = randn(num_pages, page_tokens, 2, head_dim, dtype=dtype, seed=3)
    v_pages = randn(num_pages, page_tokens, 2, head_dim, dtype=dtype, seed=4)
    ids = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(5)) + 1
    block_table = torch.full((len(lengths), max(used) + 1), 10**6, dtype=torch.int32)
    live = torch.zeros(num_pages, page_tokens, dtype=torch.bool)
    for row, (length, count) in enumerate(zip(lengths, used, strict=True)):
        mine = ids[sum(used[:row]) : sum(used[:row]) + count]
        block_table[row, :count] = mine
        for position in range(length):
            live[mine[position // page_tokens], position % page_tokens] = True
    k_pages[~live] = torch.nan
    v_pages[~live] = torch.nan
    return Cache(k_pages, v_pages, block_table, torch.tensor(lengths, dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 20, 10])
@pytest.mark.parametrize("page_tokens", [16, 4, 5, 128])
def test_paged_attention(dtype: torch.dtype, head_dim: int, page_tokens: int) -> None:
    cache = poisoned_cache([1, 0, 15, 16, 17, 100], page_tokens, head_dim, dtype)
    q = randn(6, 6, head_dim, dtype=dtype)
    arguments = (cache.block_table, cache.lengths)
    actual = ops.paged_attention(q, cache.pages, *arguments, scale=0.2)
    close(actual, reference.paged_attention(q, *cache.pages, *arguments, 0.2))
    assert torch.equal(actual[1], torch.zeros_like(actual[1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_tokens", [16, 5])
def test_paged_prefill_attention(dtype: torch.dtype, page_tokens: int) -> None:
    cache = poisoned_cache([3, 40, 100, 16], page_tokens, 64, dtype)
    query_starts = torch.tensor([0, 3, 10, 110, 111], dtype=torch.int32)
    q = randn(111, 6, 64, dtype=dtype)
    arguments = (cache.block_table, cache.lengths, query_starts)
    actual = ops.paged_prefill_attention(q, cache.pages, *arguments, scale=0.125)
    close(actual, reference.paged_prefill_attention(q, *cache.pages, *arguments, 0.125))


def test_the_reference_is_scaled_dot_product_attention() -> None:
    cache = poisoned_cache([37], 8, 64)
    q = randn(37, 6, 64)
    starts = torch.tensor([0, 37], dtype=torch.int32)
    actual = reference.paged_prefill_attention(
        q, *cache.pages, cache.block_table, cache.lengths, starts, 0.125
    )
    used = cache.block_table[0, :5]
    k, v = (pages[used].flatten(0, 1)[:37].transpose(0, 1) for pages in cache.pages)
    expected = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_a_query_has_the_same_bits_in_prefill_and_decode() -> None:
    cache = poisoned_cache([70], 16, 64)
    q = randn(70, 6, 64)
    starts = torch.tensor([0, 70], dtype=torch.int32)
    together = ops.paged_prefill_attention(
        q, cache.pages, cache.block_table, cache.lengths, starts, scale=0.125
    )
    tables = cache.block_table.expand(70, -1).contiguous()
    lengths = torch.arange(1, 71, dtype=torch.int32)
    one_by_one = ops.paged_attention(q, cache.pages, tables, lengths, scale=0.125)
    assert torch.equal(together, one_by_one)
    moved = [cache.k_pages.reshape(-1, 8, 2, 64), cache.v_pages.reshape(-1, 8, 2, 64)]
    halves = torch.stack((tables * 2, tables * 2 + 1), dim=-1).flatten(1)
    smaller = ops.paged_attention(q, (moved[0], moved[1]), halves, lengths, scale=0.125)
    assert torch.equal(together, smaller)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_write_kv(dtype: torch.dtype) -> None:
    q, k = randn(4, 6, 20, dtype=dtype), randn(4, 2, 20, dtype=dtype, seed=1)
    v = randn(4, 2, 20, dtype=dtype, seed=2)
    angles = randn(50, 10, seed=3)
    rope = (angles.cos(), angles.sin())
    places = (torch.tensor([0, 49, 7, 0]), torch.tensor([17, 3, 39, 0]))
    native = [torch.full((5, 8, 2, 20), torch.nan, dtype=dtype) for _ in range(2)]
    plain = [pages.clone() for pages in native]
    actual = ops.rope_write_kv(q, k, v, rope, places, (native[0], native[1]))
    close(actual, reference.rope_write_kv(q, k, v, *rope, *places, *plain))
    for written, expected in zip(native, plain, strict=True):
        assert torch.equal(written.isnan(), expected.isnan())
        close(written.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("places", [([50], [0]), ([-1], [0]), ([0], [40]), ([0], [-1])])
def test_a_position_or_slot_outside_is_refused(places: tuple[list[int], list[int]]) -> None:
    heads, rope = torch.zeros(1, 2, 8), (torch.zeros(50, 4), torch.zeros(50, 4))
    pages = (torch.zeros(5, 8, 2, 8), torch.zeros(5, 8, 2, 8))
    at = (torch.tensor(places[0]), torch.tensor(places[1]))
    with pytest.raises(IndexError, match="outside"):
        ops.rope_write_kv(heads, heads, heads, rope, at, pages)


def test_a_page_outside_is_refused() -> None:
    pages = (torch.zeros(5, 8, 2, 8), torch.zeros(5, 8, 2, 8))
    q, lengths = torch.zeros(1, 2, 8), torch.tensor([9], dtype=torch.int32)
    with pytest.raises(IndexError, match="page 5 is outside"):
        ops.paged_attention(q, pages, torch.tensor([[1, 5]], dtype=torch.int32), lengths, scale=1.0)
    with pytest.raises(IndexError, match="9 keys need 2 pages"):
        ops.paged_attention(q, pages, torch.tensor([[1]], dtype=torch.int32), lengths, scale=1.0)


def test_mismatched_types_are_refused() -> None:
    with pytest.raises(RuntimeError, match="expected"):
        ops.linear(torch.zeros(1, 4), torch.zeros(3, 4, dtype=torch.bfloat16))


def test_out_forms_equal_the_others() -> None:
    x, weight = randn(3, 24), randn(9, 24, seed=1)
    out, total, normed = torch.empty(3, 9), torch.empty(3, 24), torch.empty(3, 24)
    torch.ops.tandem.linear.out(x, weight, None, False, out=out)
    assert torch.equal(out, ops.linear(x, weight))
    torch.ops.tandem.add_rms_norm.out(x, x, weight[0], 1e-5, total=total, normed=normed)
    expected = ops.add_rms_norm(x, x, weight[0], 1e-5)
    assert torch.equal(total, expected[0])
    assert torch.equal(normed, expected[1])


def test_threads_change_no_bit() -> None:
    x, weight = randn(40, 203), randn(500, 203, seed=1)
    cache = poisoned_cache([70], 16, 64)
    q = randn(1, 6, 64)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            attended = ops.paged_attention(
                q, cache.pages, cache.block_table, cache.lengths, scale=0.125
            )
            results.append((ops.linear(x, weight), ops.linear(x[:2], weight), attended))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
