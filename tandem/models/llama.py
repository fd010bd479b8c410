"""Llama: grouped-query attention with rotary embedding in halves, RMS norms, SwiGLU."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.cache.pool import KVPool
from tandem.errors import WeightsError
from tandem.models.model import PrefillSequence, StepInputs
from tandem.models.spec import ModelSpec
from tandem.ops import library as ops
from tandem.weights.store import ModelFolder, Progress
from tandem.weights.tensors import TensorSource

Attention = Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]
"""From rotated queries [T, heads, head_dim] and a layer's (K pages, V pages)."""

_NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$")
_PAGE_ITEMS = 1024  # float32 values in a page of memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """``x W^T + b``."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply it to [T, K]; returns [T, N]."""
        return ops.linear(x, self.weight, self.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaLayer:
    """The weights of one layer; q, k and v stay apart, so that they need not be copied."""

    input_norm: Tensor
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    mlp_norm: Tensor
    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaWeights:
    """All weights of a model, in one type."""

    embedding: Tensor
    layers: tuple[LlamaLayer, ...]
    final_norm: Tensor
    head: Tensor
    """The embedding itself where the two are tied."""


class Llama:
    """A Llama model on the CPU; see `tandem.models.model.Model` for its verbs."""

    def __init__(self, spec: ModelSpec, weights: LlamaWeights) -> None:
        self.spec = spec
        self.weights = weights
        self._rope = rope_table(spec)
        self._scale = spec.head_dim**-0.5

    def prefill(
        self,
        sequences: Sequence[PrefillSequence],
        pool: KVPool,
        on_layer: Callable[[int], None],
    ) -> Tensor:
        """Compute several chunks at once; see `Model.prefill`."""
        batch = _PrefillBatch.build(sequences, pool)

        def attention(q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
            return ops.paged_prefill_attention(
                q, pages, batch.block_table, batch.lengths, batch.query_starts, scale=self._scale
            )

        places = (batch.positions, batch.slots)
        hidden = self._layers(batch.token_ids, places, pool, attention, on_layer)
        return self._logits(hidden.index_select(0, batch.logit_rows))

    def decode(self, inputs: StepInputs, pool: KVPool) -> Tensor:
        """Compute one token for every row; see `Model.decode`."""

        def attention(q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
            return ops.paged_attention(
                q, pages, inputs.block_table, inputs.lengths, scale=self._scale
            )

        places = (inputs.positions, inputs.slots)
        return self._logits(self._layers(inputs.token_ids, places, pool, attention, _ignore))

    def _layers(
        self,
        token_ids: Tensor,
        places: tuple[Tensor, Tensor],
        pool: KVPool,
        attention: Attention,
        on_layer: Callable[[int], None],
    ) -> Tensor:
        """The normed output [T, hidden] of the last layer."""
        eps = self.spec.rms_norm_eps
        residual = self.weights.embedding.index_select(0, token_ids)
        normed = ops.rms_norm(residual, self.weights.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self.weights.layers[1:]]
        for index, layer in enumerate(self.weights.layers):
            pages = (pool["k"][index], pool["v"][index])
            q = ops.rope_write_kv(
                self._heads(layer.q(normed)),
                self._heads(layer.k(normed)),
                self._heads(layer.v(normed)),
                self._rope,
                places,
                pages,
            )
            on_layer(index)
            attended = layer.o(attention(q, pages).flatten(1))
            residual, normed = ops.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            mlp = layer.down(ops.silu_mul(layer.gate(normed), layer.up(normed)))
            norm = next_norms[index] if index < len(next_norms) else self.weights.final_norm
            residual, normed = ops.add_rms_norm(mlp, residual, norm, eps)
        return normed

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.spec.head_dim)

    def _logits(self, hidden: Tensor) -> Tensor:
        return ops.linear(hidden, self.weights.head, to_float32=True)


def _ignore(layer: int) -> None:
    """Nobody waits for the layers of a decode step."""


def rope_table(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Cosine and sine [max_context_tokens, head_dim / 2] of all positions' angles.

    Angles are products in float32, as in the code the models were trained with.
    """
    frequencies = torch.tensor(spec.rope.inverse_frequencies(spec.head_dim), dtype=torch.float32)
    positions = torch.arange(spec.max_context_tokens, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return angles.cos(), angles.sin()


@dataclass(frozen=True, kw_only=True, slots=True)
class _PrefillBatch:
    """Chunks laid one after another."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    lengths: Tensor
    query_starts: Tensor
    logit_rows: Tensor

    @classmethod
    def build(cls, sequences: Sequence[PrefillSequence], pool: KVPool) -> _PrefillBatch:
        page_tokens = pool.groups[0].page_tokens
        token_ids: list[int] = []
        starts = [0]
        positions, slots = [], []
        width = max(len(sequence.page_ids) for sequence in sequences)
        block_table = torch.zeros(len(sequences), width, dtype=torch.int32)
        for row, sequence in enumerate(sequences):
            token_ids.extend(sequence.token_ids)
            starts.append(len(token_ids))
            pages = torch.tensor(sequence.page_ids, dtype=torch.int64)
            block_table[row, : len(pages)] = pages
            at = torch.arange(sequence.start, sequence.start + starts[-1] - starts[-2])
            positions.append(at)
            slots.append(pages[at // page_tokens] * page_tokens + at % page_tokens)
        ends = [s.start + len(s.token_ids) for s in sequences]
        wanted = [starts[i + 1] - 1 for i, s in enumerate(sequences) if s.needs_logits]
        return cls(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            positions=torch.cat(positions),
            slots=torch.cat(slots),
            block_table=block_table,
            lengths=torch.tensor(ends, dtype=torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            logit_rows=torch.tensor(wanted, dtype=torch.int64),
        )


def load_llama(folder: ModelFolder, dtype: torch.dtype, progress: Progress) -> Llama:
    """Load a checkpoint; weights already of type ``dtype`` stay in the mapped file.

    Raises:
        WeightsError: a tensor is missing, of the wrong shape, unknown or not finite, or the model
            needs something this architecture does not do.
    """
    spec = folder.spec
    if spec.rope.layout != "halves":
        raise WeightsError(str(folder.path), f"rope layout {spec.rope.layout!r} is not supported")
    reader = _Reader(TensorSource.open(folder), dtype)
    embedding = reader("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    layers = []
    for index in range(spec.num_layers):
        progress("loading weights", index, spec.num_layers)
        layers.append(_load_layer(reader, spec, f"model.layers.{index}"))
    final_norm = reader("model.norm.weight", spec.hidden_size)
    head = embedding
    if not spec.tie_embeddings:
        head = reader("lm_head.weight", spec.vocab_size, spec.hidden_size)
    _refuse_unknown(folder, spec, reader.source.unused())
    progress("loading weights", spec.num_layers, spec.num_layers)
    weights = LlamaWeights(
        embedding=embedding, layers=tuple(layers), final_norm=final_norm, head=head
    )
    return Llama(spec, weights)


class _Reader:
    def __init__(self, source: TensorSource, dtype: torch.dtype) -> None:
        self.source = source
        self._dtype = dtype

    def __call__(self, name: str, *shape: int) -> Tensor:
        tensor = self.source.get(name, shape).to(self._dtype)
        tensor.view(-1)[::_PAGE_ITEMS].sum()  # read from disk here, under the progress bar
        return tensor

    def projection(self, name: str, width: int, depth: int, bias: bool) -> Projection:
        return Projection(
            weight=self(f"{name}.weight", width, depth),
            bias=self(f"{name}.bias", width) if bias else None,
        )


def _load_layer(reader: _Reader, spec: ModelSpec, name: str) -> LlamaLayer:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    return LlamaLayer(
        input_norm=reader(f"{name}.input_layernorm.weight", hidden),
        q=reader.projection(f"{attention}.q_proj", q_size, hidden, spec.attention_bias),
        k=reader.projection(f"{attention}.k_proj", kv_size, hidden, spec.attention_bias),
        v=reader.projection(f"{attention}.v_proj", kv_size, hidden, spec.attention_bias),
        o=reader.projection(f"{attention}.o_proj", hidden, q_size, spec.attention_bias),
        mlp_norm=reader(f"{name}.post_attention_layernorm.weight", hidden),
        gate=reader.projection(f"{mlp}.gate_proj", inner, hidden, spec.mlp_bias),
        up=reader.projection(f"{mlp}.up_proj", inner, hidden, spec.mlp_bias),
        down=reader.projection(f"{mlp}.down_proj", hidden, inner, spec.mlp_bias),
    )


def _refuse_unknown(folder: ModelFolder, spec: ModelSpec, unused: frozenset[str]) -> None:
    """A tensor nobody asked for means that config.json describes another model."""
    unknown = sorted(
        name
        for name in unused
        if not _NOT_WEIGHTS.search(name) and not (spec.tie_embeddings and name == "lm_head.weight")
    )
    if unknown:
        shown = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        raise WeightsError(
            str(folder.path),
            f"has {len(unknown)} tensors that config.json does not account for: {shown}",
        )
