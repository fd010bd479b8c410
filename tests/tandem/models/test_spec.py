"""Reading config.json: both spellings, every refusal by name, rotary frequencies."""

from __future__ import annotations

import json
import os
import pickle
import sys
from subprocess import run
from typing import Any

import pytest

from tandem.errors import WeightsError
from tandem.models.spec import ModelSpec, RopeSpec

BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.from_hf_config({**BASE, **changes}, "config.json")


def test_defaults_follow_the_architecture() -> None:
    found = spec()
    assert (found.num_kv_heads, found.head_dim) == (4, 16)
    assert not found.tie_embeddings
    assert found.rope == RopeSpec(theta=10000.0)
    assert found.eos_token_ids == ()
    assert found.bos_token_id is None


def test_both_spellings_of_rope_give_the_same_spec() -> None:
    old = spec(rope_theta=5e5, rope_scaling={**LLAMA31, "type": "llama3"}, torch_dtype="bfloat16")
    new = spec(rope_parameters={**LLAMA31, "rope_theta": 5e5}, dtype="bfloat16")
    assert old == new
    assert json.loads(new.rope.scaling)["factor"] == 8.0


def test_old_type_key_and_default_scaling() -> None:
    assert spec(rope_scaling={"type": "default"}).rope.scaling == ""
    scaling = spec(rope_scaling={"type": "linear", "factor": 2}).rope.scaling
    assert scaling == '{"factor":2.0,"rope_type":"linear"}'


def test_eos_may_be_a_list() -> None:
    assert spec(eos_token_id=[9, 2, 9]).eos_token_ids == (2, 9)
    assert spec(eos_token_id=3).eos_token_ids == (3,)


def test_architecture_from_the_class_name() -> None:
    config = {key: value for key, value in BASE.items() if key != "model_type"}
    found = ModelSpec.from_hf_config({**config, "architectures": ["LlamaForCausalLM"]}, "f")
    assert found.architecture == "llama"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "supported ones are: llama"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": 10**12}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {**LLAMA31, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
    ],
)
def test_refusals_name_file_and_key(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(WeightsError, match=named) as caught:
        spec(**changes)
    assert caught.value.file == "config.json"


def test_cache_groups_are_separate_keys_and_values() -> None:
    groups = spec(num_key_value_heads=2).cache_groups(16, "bfloat16")
    assert [group.name for group in groups] == ["k", "v"]
    assert {group.token_shape for group in groups} == {(2, 16)}
    assert {group.page_bytes for group in groups} == {16 * 2 * 16 * 2}


def test_plain_frequencies() -> None:
    found = RopeSpec(theta=10000.0).inverse_frequencies(8)
    assert found == pytest.approx((1.0, 0.1, 0.01, 0.001))


def test_linear_scaling_divides_all() -> None:
    scaled = spec(rope_scaling={"rope_type": "linear", "factor": 4.0}).rope
    plain = RopeSpec(theta=10000.0)
    assert scaled.inverse_frequencies(8) == pytest.approx(
        [frequency / 4 for frequency in plain.inverse_frequencies(8)]
    )


def test_llama3_scaling_against_transformers_numbers() -> None:
    # transformers 5.24.0, ROPE_INIT_FUNCTIONS["llama3"], theta 500000, head size 16
    expected = [
        1.0,
        0.193922758102417,
        0.03760603070259094,
        0.00729266507551074,
        0.0005248460220173001,
        3.428102354519069e-05,
        6.647869668086059e-06,
        1.289173155782919e-06,
    ]
    found = spec(rope_theta=5e5, rope_scaling=LLAMA31).rope.inverse_frequencies(16)
    assert found == pytest.approx(expected, rel=1e-5)


def test_spec_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(spec())) == spec()


def test_reading_models_needs_no_torch_and_no_gguf() -> None:
    program = (
        "import sys, tandem.weights.store, tandem.tokenizer\n"
        "sys.exit(bool({'torch', 'gguf', 'transformers', 'ray'} & sys.modules.keys()))"
    )
    assert run([sys.executable, "-c", program], check=False, env=_env()).returncode == 0


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
