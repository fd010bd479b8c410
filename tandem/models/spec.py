"""What a model is, read from its configuration: sizes, rotary embedding, cache groups; no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.cache.groups import CacheDtype, CacheGroup
from tandem.errors import WeightsError

KNOWN_ARCHITECTURES = ("llama",)
"""Values of `model_type` that Tandem has a model for."""

_CLASS_NAMES = {"LlamaForCausalLM": "llama"}
_KNOWN_SCALING = ("linear", "llama3")
_SCALING_FIELDS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "original_max_position_embeddings",
    ),
}
_MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary position embedding (arXiv:2104.09864) as one model uses it."""

    theta: float
    """Base of the frequencies."""
    layout: Literal["halves", "interleaved"] = "halves"
    """Which dimensions rotate together: i with i + head_dim/2, or 2i with 2i + 1."""
    scaling: str = ""
    """Canonical JSON of the scaling parameters (`rope_type` and its fields); empty is none."""

    def inverse_frequencies(self, head_dim: int) -> tuple[float, ...]:
        """Angle per position of each rotated pair, in radians.

        Scaling `linear` divides all by the factor (arXiv:2306.15595); `llama3` divides only the low
        frequencies, with a smooth passage between (`apply_scaling` in Llama 3.1's reference code).

        Args:
            head_dim: size of one head, even.

        Returns:
            head_dim / 2 values, descending.
        """
        plain = [self.theta ** (-2.0 * pair / head_dim) for pair in range(head_dim // 2)]
        if not self.scaling:
            return tuple(plain)
        scaling = json.loads(self.scaling)
        factor = scaling["factor"]
        if scaling["rope_type"] == "linear":
            return tuple(frequency / factor for frequency in plain)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        original = scaling["original_max_position_embeddings"]
        scaled = []
        for frequency in plain:
            turns = original * frequency / (2 * math.pi)
            kept = min(max((turns - low) / (high - low), 0.0), 1.0)
            scaled.append(kept * frequency + (1 - kept) * frequency / factor)
        return tuple(scaled)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Everything about a model except its weights."""

    architecture: str
    """One of `KNOWN_ARCHITECTURES`."""
    vocab_size: int
    """Rows of the embedding; the tokenizer may know fewer ids."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_context_tokens: int
    """Prompt and output together that the model was made for."""
    tie_embeddings: bool
    """The output projection is the embedding's own matrix."""
    attention_bias: bool
    """The q, k, v and o projections have biases."""
    mlp_bias: bool
    """The gate, up and down projections have biases."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Ids that end a sequence, ascending; may be empty."""

    def cache_groups(self, page_tokens: int, dtype: CacheDtype) -> tuple[CacheGroup, ...]:
        """The buffers that hold this model's cache: separate `k` and `v`."""
        return tuple(
            CacheGroup(
                name=name,
                num_layers=self.num_layers,
                page_tokens=page_tokens,
                token_shape=(self.num_kv_heads, self.head_dim),
                dtype=dtype,
            )
            for name in ("k", "v")
        )

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], file: str) -> ModelSpec:
        """Read a Hugging Face `config.json`, in the spelling of transformers 4 or 5.

        Args:
            config: the parsed file.
            file: its path, for error messages.

        Returns:
            The specification, all sizes checked against one another.

        Raises:
            WeightsError: the architecture is unknown, a field is missing, of the wrong type or
                impossible, or the model needs something Tandem does not do.
        """
        return _llama_spec(_architecture(config, file), _Fields(config, file))


class _Fields:
    """Typed access to a parsed configuration file; every complaint names file and key."""

    def __init__(self, config: Mapping[str, Any], file: str) -> None:
        self.config = config
        self.file = file

    def wrong(self, key: str, problem: str) -> WeightsError:
        return WeightsError(self.file, f"{key} {problem}")

    def size(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise self.wrong(key, "is missing")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_SIZE:
            raise self.wrong(key, f"must be a positive integer, not {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, f"must be true or false, not {value!r}")
        return value

    def positive(self, key: str, default: float) -> float:
        return positive_number(self.config.get(key, default), key, self.file)

    def token_ids(self, key: str) -> tuple[int, ...]:
        return token_ids(self.config.get(key), key, self.file)


def positive_number(value: object, key: str, file: str) -> float:
    """Return ``value`` as a finite number above 0.

    Raises:
        WeightsError: it is none.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:  # type: ignore[operator, arg-type]
        raise WeightsError(file, f"{key} must be a finite number above 0, not {value!r}")
    return float(value)  # type: ignore[arg-type]


def token_ids(value: object, key: str, file: str) -> tuple[int, ...]:
    """Return an id, a list of ids or null as distinct ids in ascending order.

    Raises:
        WeightsError: it is something else.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise WeightsError(file, f"{key} must be token ids, not {value!r}")
    return tuple(sorted(set(ids)))


def _architecture(config: Mapping[str, Any], file: str) -> str:
    name = config.get("model_type")
    if name is None:
        classes = config.get("architectures")
        first = classes[0] if isinstance(classes, list) and classes else None
        name = _CLASS_NAMES.get(first, first) if isinstance(first, str) else None
    if name not in KNOWN_ARCHITECTURES:
        known = ", ".join(KNOWN_ARCHITECTURES)
        raise WeightsError(file, f"model_type is {name!r}; the supported ones are: {known}")
    return str(name)


def _llama_spec(architecture: str, fields: _Fields) -> ModelSpec:
    if fields.config.get("quantization_config") is not None:
        raise fields.wrong("quantization_config", "is set; quantised checkpoints need GGUF form")
    if (act := fields.config.get("hidden_act", "silu")) != "silu":
        raise fields.wrong("hidden_act", f"is {act!r}; only 'silu' is supported")
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    if fields.config.get("head_dim") is None and hidden % heads:
        raise fields.wrong("hidden_size", f"{hidden} is not a multiple of {heads} heads")
    head_dim = fields.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.wrong("head_dim", f"must be even, not {head_dim}")
    max_context = fields.size("max_position_embeddings", 2048)
    bos = fields.token_ids("bos_token_id")
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope=_rope_spec(fields, max_context),
        max_context_tokens=max_context,
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def _rope_spec(fields: _Fields, max_context: int) -> RopeSpec:
    parameters: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = fields.config.get(key) or {}
        if not isinstance(value, Mapping):
            raise fields.wrong(key, f"must be an object, not {value!r}")
        parameters.update(value)
    theta = parameters.get("rope_theta", fields.config.get("rope_theta", 10000.0))
    partial = parameters.get("partial_rotary_factor", fields.config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise fields.wrong("partial_rotary_factor", f"is {partial!r}; only 1 is supported")
    return RopeSpec(
        theta=positive_number(theta, "rope_theta", fields.file),
        scaling=_rope_scaling(parameters, fields, max_context),
    )


def _rope_scaling(parameters: Mapping[str, Any], fields: _Fields, max_context: int) -> str:
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type == "default":
        return ""
    if rope_type not in _KNOWN_SCALING:
        known = ", ".join(("default", *_KNOWN_SCALING))
        raise fields.wrong("rope_type", f"is {rope_type!r}; the supported ones are: {known}")
    scaling: dict[str, Any] = {"rope_type": rope_type}
    for key in _SCALING_FIELDS[rope_type]:
        default = max_context if key == "original_max_position_embeddings" else None
        scaling[key] = positive_number(parameters.get(key, default), key, fields.file)
    if rope_type == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise fields.wrong("high_freq_factor", "must be above low_freq_factor")
    return json.dumps(scaling, sort_keys=True, separators=(",", ":"))
