"""What every operator computes, in plain torch: the meaning that all backends are compared with.

Shapes: T tokens, H query heads, G kv heads, D head size, P pages, S tokens in a page, B sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, to_float32: bool) -> Tensor:
    """``x W^T + b``.

    Args:
        x: [T, K].
        weight: [N, K].
        bias: [N] or None.
        to_float32: return float32 whatever the type of the weights.

    Returns:
        [T, N].
    """
    if not to_float32 or x.dtype == torch.float32:
        return functional.linear(x, weight, bias)
    wide = None if bias is None else bias.float()
    return functional.linear(x.float(), weight.float(), wide)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (arXiv:1910.07467, eq. 4).

    Returns:
        The shape and type of ``x``; computed in float32.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum ``x + residual``, rounded to their type, and its `rms_norm`."""
    total = x + residual
    return total, rms_norm(total, weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``gate / (1 + exp(-gate)) * up`` (SwiGLU, arXiv:2002.05202, eq. 5), computed in float32."""
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


def rope_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate dimension i with i + D/2 (arXiv:2104.09864, eq. 34, in the layout of Hugging Face).

    Args:
        x: [T, heads, D].
        cos: [T, D/2], float32.
        sin: [T, D/2], float32.

    Returns:
        The shape and type of ``x``.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def rope_write_kv(  # noqa: PLR0913 - an operator takes tensors
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
) -> Tensor:
    """Rotate queries and keys, and write keys and values into their slots.

    Args:
        q: [T, H, D].
        k: [T, G, D].
        v: [T, G, D].
        cos: [C, D/2] for positions 0 .. C - 1, float32.
        sin: [C, D/2].
        positions: [T] int64.
        slots: [T] int64, page * S + offset; several rows may name the same slot of page 0.
        k_pages: [P, S, G, D], written to.
        v_pages: [P, S, G, D], written to.

    Returns:
        The rotated queries [T, H, D].
    """
    cos, sin = cos[positions], sin[positions]
    k_pages.flatten(0, 1)[slots] = rope_halves(k, cos, sin)
    v_pages.flatten(0, 1)[slots] = v
    return rope_halves(q, cos, sin)


def _gather(pages: Tensor, page_ids: Tensor, length: int) -> Tensor:
    return pages[page_ids].flatten(0, 1)[:length]


def _attend(q: Tensor, k: Tensor, v: Tensor, first_length: int, scale: float) -> Tensor:
    """Query i of [T, H, D] sees the first ``first_length + i`` of the keys [length, G, D]."""
    group = q.shape[1] // k.shape[1]
    k = k.float().repeat_interleave(group, dim=1)
    v = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,khd->htk", q.float() * scale, k)
    seen = torch.arange(q.shape[0])[:, None] + first_length
    scores = scores.masked_fill(torch.arange(k.shape[0]) >= seen, -torch.inf)
    return torch.einsum("htk,khd->thd", scores.softmax(-1), v).to(q.dtype)


def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """``softmax(scale q K^T) V`` with one query per sequence (arXiv:1706.03762, eq. 1).

    Args:
        q: [B, H, D].
        k_pages: [P, S, G, D].
        v_pages: [P, S, G, D].
        block_table: [B, W] int32, each sequence's pages in order; entries past its length are
            never read.
        lengths: [B] int32, keys each query sees; 0 gives zeros.
        scale: of the scores.

    Returns:
        [B, H, D].
    """
    out = torch.zeros_like(q)
    for row, length in enumerate(lengths.tolist()):
        if length:
            k = _gather(k_pages, block_table[row, : -(-length // k_pages.shape[1])], length)
            v = _gather(v_pages, block_table[row, : -(-length // k_pages.shape[1])], length)
            out[row] = _attend(q[row : row + 1], k, v, length, scale)[0]
    return out


def paged_prefill_attention(  # noqa: PLR0913 - an operator takes tensors
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of several sequences' last tokens over all their keys.

    Args:
        q: [T, H, D], the sequences' queries one after another.
        k_pages: [P, S, G, D]; the queries' own keys are already in it.
        v_pages: [P, S, G, D].
        block_table: [B, W] int32.
        lengths: [B] int32, keys of each sequence, its queries' own included.
        query_starts: [B + 1] int32, where each sequence's queries start, then T.
        scale: of the scores.

    Returns:
        [T, H, D]; the last query of a sequence sees all its keys, the one before one less.
    """
    out = torch.zeros_like(q)
    starts = query_starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        first, last = starts[row], starts[row + 1]
        if first == last:
            continue
        used = block_table[row, : -(-length // k_pages.shape[1])]
        k, v = _gather(k_pages, used, length), _gather(v_pages, used, length)
        out[first:last] = _attend(q[first:last], k, v, length - (last - first) + 1, scale)
    return out
