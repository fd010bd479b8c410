"""Names and shapes of a Llama checkpoint's tensors, and what GGUF files call them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tandem.errors import MissingTensor, ShapeMismatch
from tandem.models.spec import ModelSpec

_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")


def llama_tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a Llama model of these sizes needs, by its Hugging Face name."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices = {
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, shape in matrices.items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if spec.attention_bias if name.startswith("self_attn") else spec.mlp_bias:
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def check_llama_tensors(spec: ModelSpec, found: Mapping[str, tuple[int, ...]], file: str) -> None:
    """Compare a checkpoint's tensors with what its configuration calls for.

    Args:
        spec: from the configuration.
        found: shapes by Hugging Face name; more tensors than needed are no error.
        file: named in errors.

    Raises:
        MissingTensor: one is not there.
        ShapeMismatch: one has another shape.
    """
    if spec.num_layers > len(found):
        raise MissingTensor(file, f"{len(found)} tensors cannot make {spec.num_layers} layers")
    for name, shape in llama_tensor_shapes(spec).items():
        if name not in found:
            raise MissingTensor(file, f"tensor {name} is missing")
        if found[name] != shape:
            have, want = list(found[name]), list(shape)
            raise ShapeMismatch(file, f"{name} has shape {have}, the configuration says {want}")


def hf_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a Llama tensor in a GGUF file, or None when it is no such tensor."""
    if gguf_name in _GGUF_TOP:
        return _GGUF_TOP[gguf_name]
    match = _GGUF_LAYER_NAME.fullmatch(gguf_name)
    if match is None or match[2] not in _GGUF_LAYER:
        return None
    return f"model.layers.{match[1]}.{_GGUF_LAYER[match[2]]}.{match[3]}"
