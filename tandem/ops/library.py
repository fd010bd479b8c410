"""The `tandem::*` operators: schemas, reference kernels, and the functions that models call.

Each operator has a form that returns new tensors and an `out` form that writes into given ones, so
that a step can be captured and replayed in fixed memory. The references serve every device; native
kernels (tandem.ops.native) take their place where they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from tandem.ops import reference

_SCHEMAS: dict[str, tuple[str, str]] = {
    # name: (arguments, outputs of the out form)
    "linear": ("Tensor x, Tensor weight, Tensor? bias, bool to_float32", "out"),
    "rms_norm": ("Tensor x, Tensor weight, float eps", "out"),
    "add_rms_norm": ("Tensor x, Tensor residual, Tensor weight, float eps", "total normed"),
    "silu_mul": ("Tensor gate, Tensor up", "out"),
    "rope_write_kv": (
        "Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor positions, Tensor slots, "
        "Tensor(y!) k_pages, Tensor(z!) v_pages",
        "out",
    ),
    "paged_attention": (
        "Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor lengths, float scale",
        "out",
    ),
    "paged_prefill_attention": (
        "Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor lengths, "
        "Tensor query_starts, float scale",
        "out",
    ),
}


def _with_outputs(compute: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    def compute_into(*arguments: Any, **outputs: Tensor) -> Any:
        results = compute(*arguments)
        for name, result in zip(names, results if len(names) > 1 else (results,), strict=True):
            outputs[name].copy_(result)
        written = tuple(outputs[name] for name in names)
        return written if len(names) > 1 else written[0]

    return compute_into


def _define() -> Library:
    library = Library("tandem", "DEF")
    for op, (arguments, outputs) in _SCHEMAS.items():
        names = outputs.split()
        fresh = ", ".join("Tensor" for _ in names)
        written = ", ".join(f"Tensor({letter}!)" for letter, _ in zip("ab", names, strict=False))
        declared = ", ".join(
            f"Tensor({letter}!) {name}" for letter, name in zip("ab", names, strict=False)
        )
        one = len(names) == 1
        library.define(f"{op}({arguments}) -> {fresh if one else f'({fresh})'}")
        library.define(
            f"{op}.out({arguments}, *, {declared}) -> {written if one else f'({written})'}"
        )
        compute = getattr(reference, op)
        # below CPU in dispatch order: a native kernel, once loaded, is preferred
        library.impl(op, compute, "CompositeExplicitAutograd")
        library.impl(f"{op}.out", _with_outputs(compute, names), "CompositeExplicitAutograd")
    return library


_LIBRARY = _define()
_ops = torch.ops.tandem


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, to_float32: bool = False
) -> Tensor:
    """See `reference.linear`."""
    result: Tensor = _ops.linear.default(x, weight, bias, to_float32)
    return result


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`."""
    result: Tensor = _ops.rms_norm.default(x, weight, eps)
    return result


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`."""
    total, normed = _ops.add_rms_norm.default(x, residual, weight, eps)
    return total, normed


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `reference.silu_mul`."""
    result: Tensor = _ops.silu_mul.default(gate, up)
    return result


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
) -> Tensor:
    """See `reference.rope_write_kv`; ``rope`` is (cos, sin), ``places`` (positions, slots)."""
    result: Tensor = _ops.rope_write_kv.default(q, k, v, *rope, *places, *pages)
    return result


def paged_attention(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
) -> Tensor:
    """See `reference.paged_attention`; ``pages`` is (k_pages, v_pages)."""
    result: Tensor = _ops.paged_attention.default(q, *pages, block_table, lengths, scale)
    return result


def paged_prefill_attention(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    block_table: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
) -> Tensor:
    """See `reference.paged_prefill_attention`; ``pages`` is (k_pages, v_pages)."""
    result: Tensor = _ops.paged_prefill_attention.default(
        q, *pages, block_table, lengths, query_starts, scale
    )
    return result
