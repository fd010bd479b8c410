"""A tiny checkpoint as a GGUF file, written with llama.cpp's own writer, in its row order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tandem.testing.tiny import TINY_SPECIAL_TOKENS
from tandem.tokenizer.alphabet import byte_alphabet
from tandem.weights.checkpoint import read_json

TINY_GGUF_VOCAB_SIZE = 261
"""The tiny tokenizer's ids and one merged token, ` t`."""

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(
    path: Path,
    folder: Path,
    *,
    packing: str = "F32",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Convert what `write_tiny_llama` wrote with a ``vocab_size`` of `TINY_GGUF_VOCAB_SIZE`.

    Args:
        path: the .gguf file to write.
        folder: of the tiny checkpoint, in one safetensors file.
        packing: how matrices are packed: a name of `GGMLQuantizationType` that gguf can write.
        metadata: keys to set differently; None leaves a key out.
    """
    config = read_json(folder / "config.json")
    writer = GGUFWriter(str(path), "llama")
    for key, value in {**_metadata(config), **(metadata or {})}.items():
        _add(writer, key, value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        count = heads.get(name.split(".")[-2])
        rows = tensor if count is None else _interleaved(tensor, count)
        kind = GGMLQuantizationType[packing if tensor.ndim > 1 else "F32"]
        writer.add_tensor(gguf_name(name), quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """What a GGUF file calls the tensor that Hugging Face calls ``name``."""
    if name in _TOP:
        return _TOP[name]
    _, _, layer, part = name.split(".", 3)
    part, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


def _interleaved(tensor: NDArray[Any], heads: int) -> NDArray[Any]:
    """Bring rows into llama.cpp's order, as `permute` in its `conversion/llama.py` does."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    special = TINY_SPECIAL_TOKENS
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": config["head_dim"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*byte_alphabet(), *special, "\u0120t"],
        "tokenizer.ggml.token_type": [
            *[int(TokenType.NORMAL)] * 256,
            *[int(TokenType.CONTROL)] * len(special),
            int(TokenType.NORMAL),
        ],
        "tokenizer.ggml.merges": ["\u0120 t"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    }


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
