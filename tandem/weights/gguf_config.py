"""From a GGUF file's metadata to the `config.json` of the same model at Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from tandem.errors import WeightsError
from tandem.models.spec import KNOWN_ARCHITECTURES, RopeSpec, positive_number
from tandem.weights.gguf_file import GgufFile, MetadataValue

ROPE_FACTORS_NAME = "rope_freqs.weight"
"""A tensor that Llama 3.1 files carry instead of the parameters of its rotary scaling."""

_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_Single = int | float | bool | str
_NO_TOKEN = (-1, 2**32 - 1)
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf_config(file: GgufFile) -> dict[str, Any]:
    """Translate the metadata of a Llama GGUF file.

    Raises:
        WeightsError: the architecture is unknown, a key is missing or impossible, or the model
            needs something Tandem does not do.
    """
    reader = _Metadata(file.metadata, str(file.path))
    _check_kind(reader)
    heads = reader.integer("llama.attention.head_count")
    hidden = reader.integer("llama.embedding_length")
    head_dim = reader.integer("llama.attention.key_length", hidden // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (found := reader.integer(key, head_dim)) != head_dim:
            raise reader.wrong(key, f"is {found}, but heads have size {head_dim}")
    theta = reader.number("llama.rope.freq_base", 10000.0)
    if "token_embd.weight" not in file.tensors:
        raise reader.wrong("token_embd.weight", "is missing")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": reader.integer("llama.feed_forward_length"),
        "num_hidden_layers": reader.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": reader.integer("llama.context_length"),
        "rms_norm_eps": reader.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(reader, file, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "bos_token_id": reader.token_id("bos_token_id"),
        "eos_token_id": sorted(
            {token_id for key in _EOS_KEYS if (token_id := reader.token_id(key)) is not None}
        ),
        "torch_dtype": "float32",
    }


class _Metadata:
    """Typed access to metadata; every complaint names file and key."""

    def __init__(self, values: Mapping[str, MetadataValue], file: str) -> None:
        self.values = values
        self.file = file

    def wrong(self, key: str, problem: str) -> WeightsError:
        return WeightsError(self.file, f"{key} {problem}")

    def single(self, key: str, default: _Single | None = None) -> _Single:
        value = self.values.get(key, default)
        if value is None:
            raise self.wrong(key, "is missing")
        if not isinstance(value, _Single):
            raise self.wrong(key, "must be one value, not a list (such as one per layer)")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.single(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise self.wrong(key, f"must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return positive_number(self.single(key, default), key, self.file)

    def token_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}"
        value = self.single(key, -1)
        if value in _NO_TOKEN:
            return None
        if not isinstance(value, int) or not 0 <= value < 2**31:
            raise self.wrong(key, f"must be a token id, not {value!r}")
        return value


def _check_kind(reader: _Metadata) -> None:
    architecture = reader.single("general.architecture")
    if architecture not in KNOWN_ARCHITECTURES:
        known = ", ".join(KNOWN_ARCHITECTURES)
        raise reader.wrong(
            "general.architecture", f"is {architecture!r}; the supported ones are: {known}"
        )
    if reader.single("llama.expert_count", 0) != 0:
        raise reader.wrong("llama.expert_count", "is set; mixtures of experts are not supported")
    if reader.single("split.count", 1) not in (0, 1):
        raise reader.wrong("split.count", "says that this is one part of several; merge them first")


def _rope_scaling(
    reader: _Metadata, file: GgufFile, theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = reader.single("llama.rope.scaling.type", "none")
    if kind == "linear":
        factor = reader.number("llama.rope.scaling.factor")
        return {"rope_type": "linear", "factor": factor}
    if kind != "none":
        raise reader.wrong("llama.rope.scaling.type", f"is {kind!r}; none and linear are supported")
    if ROPE_FACTORS_NAME not in file.tensors:
        return None
    tensor = file.tensors[ROPE_FACTORS_NAME]
    factors = dequantize(file.rows(tensor), tensor.packing).reshape(-1)
    factor = float(factors.max())
    scaling = {**_LLAMA3_SCALING, "factor": factor}
    if not factor >= 1 or not _explains(scaling, factors, theta, head_dim):
        raise reader.wrong(ROPE_FACTORS_NAME, "holds factors that no known scaling explains")
    return scaling


def _explains(
    scaling: dict[str, Any], factors: NDArray[np.float32], theta: float, head_dim: int
) -> bool:
    """Whether this scaling divides each frequency by exactly the factors that the file carries."""
    if factors.size != head_dim // 2 or not np.isfinite(factors).all():
        return False
    plain = RopeSpec(theta=theta).inverse_frequencies(head_dim)
    scaled = RopeSpec(theta=theta, scaling=json.dumps(scaling)).inverse_frequencies(head_dim)
    return bool(np.allclose(np.divide(plain, scaled), factors, rtol=1e-3, atol=0))
