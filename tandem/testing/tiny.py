"""A tiny seeded Llama checkpoint for tests: random weights, byte-level tokenizer, chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tandem.tokenizer.alphabet import byte_alphabet
from tandem.weights.checkpoint import INDEX_NAME

TINY_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
"""Ids 256 to 259, after the 256 bytes whose ids are their values."""
TINY_EOS_TOKEN_ID = 258
TINY_VOCAB_SIZE = 260

_LOGIT_SCALE = 6.0
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_llama(  # noqa: PLR0913 - sizes of a model, all with defaults
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int = TINY_VOCAB_SIZE,
    num_layers: int = 2,
    hidden: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_context: int = 512,
    tie_embeddings: bool = False,
    sharded: bool = False,
) -> None:
    """Write a Llama checkpoint as a Hugging Face folder.

    The weights are random, scaled so that logits have a standard deviation of about 6 and depend on
    the whole context: a greedy choice is seldom close, and a wrong key or value changes it.

    Args:
        folder: created when missing; files in it are overwritten.
        seed: the same seed and sizes give the same bytes.
        vocab_size: rows of the embedding; the tokenizer always knows `TINY_VOCAB_SIZE` ids.
        num_layers: transformer layers.
        hidden: width of the residual stream, a multiple of ``num_heads``.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of ``num_heads``.
        max_context: `max_position_embeddings`.
        tie_embeddings: leave out `lm_head.weight` and use the embedding instead.
        sharded: two safetensors files and an index instead of one file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head_dim = hidden // num_heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie_embeddings,
        "bos_token_id": 257,
        "eos_token_id": TINY_EOS_TOKEN_ID,
        "torch_dtype": "float32",
    }
    _write_json(folder / "config.json", config)
    write_byte_level_tokenizer(folder)
    tensors = _random_tensors(config, np.random.default_rng(seed))
    if sharded:
        _save_sharded(folder, tensors)
    else:
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def write_byte_level_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: 256 bytes, then `TINY_SPECIAL_TOKENS`."""
    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    special: list[dict[str, Any]] = [
        {
            "id": 256 + index,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, content in enumerate(TINY_SPECIAL_TOKENS)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    vocab.update({token["content"]: token["id"] for token in special})
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    _write_json(folder / "tokenizer.json", tokenizer)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    _write_json(folder / "tokenizer_config.json", {**names, "chat_template": _TEMPLATE})


def _random_tensors(
    config: Mapping[str, Any], random: np.random.Generator
) -> dict[str, NDArray[np.float32]]:
    hidden, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        scale = gain / np.sqrt(columns)
        return np.asarray(random.standard_normal((rows, columns)) * scale, dtype=np.float32)

    def norm() -> NDArray[np.float32]:
        return np.asarray(1 + 0.1 * random.standard_normal(hidden), dtype=np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden, _LOGIT_SCALE)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": norm(),
            f"{prefix}.self_attn.q_proj.weight": matrix(q_rows, hidden, 1.5),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_rows, hidden, 1.5),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_rows, hidden, 1.5),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, q_rows, 1.5),
            f"{prefix}.post_attention_layernorm.weight": norm(),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, hidden, 1.5),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, hidden, 1.5),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, inner, 1.5),
        }
    tensors["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, hidden, _LOGIT_SCALE)
    return tensors


def _save_sharded(folder: Path, tensors: dict[str, NDArray[np.float32]]) -> None:
    names = sorted(tensors)
    half = len(names) // 2
    shards = {
        "model-00001-of-00002.safetensors": names[:half],
        "model-00002-of-00002.safetensors": names[half:],
    }
    weight_map = {}
    for file, members in shards.items():
        part = {name: tensors[name] for name in members}
        save_file(part, str(folder / file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(members, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
