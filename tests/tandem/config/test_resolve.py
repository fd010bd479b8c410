from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.config.resolve import available_memory_bytes, resolve, usable_cores
from tandem.config.tree import TandemConfig
from tandem.errors import ConfigError
from tandem.models.spec import ModelSpec, RopeSpec

SPEC = ModelSpec(
    architecture="llama",
    vocab_size=300,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=10000.0),
    max_context_tokens=512,
    tie_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    bos_token_id=None,
    eos_token_ids=(2,),
)
PAGE_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # groups, layers, tokens, heads, head size, float32
PLENTY = 1 << 34


def config(**sections: dict[str, Any]) -> TandemConfig:
    whole = TandemConfig()
    changed = {
        name: fields if not isinstance(fields, dict) else replace(getattr(whole, name), **fields)
        for name, fields in sections.items()
    }
    return replace(whole, **changed)


def test_defaults_take_two_contexts_of_pages_and_share_the_cores() -> None:
    resolved = resolve(TandemConfig(), SPEC, cores=8, available_memory_bytes=PLENTY)
    assert resolved.dtype == "float32"
    assert resolved.max_context_tokens == 512
    assert (resolved.prefill_pages, resolved.decode_pages) == (64, 64)
    assert (resolved.prefill_threads, resolved.decode_threads) == (4, 4)


def test_written_values_are_kept() -> None:
    asked = config(
        model={"dtype": "bfloat16", "max_context_tokens": 100},
        prefill={"num_pages": 3, "threads": 5},
        decode={"num_pages": 7, "threads": 6},
    )
    resolved = resolve(asked, SPEC, cores=1, available_memory_bytes=PLENTY)
    assert resolved.dtype == "bfloat16"
    assert resolved.max_context_tokens == 100
    assert (resolved.prefill_pages, resolved.decode_pages) == (3, 7)
    assert (resolved.prefill_threads, resolved.decode_threads) == (5, 6)


def test_colocated_workers_have_the_cores_to_themselves() -> None:
    colocated = replace(TandemConfig(), mode="colocated")
    assert resolve(colocated, SPEC, 8, PLENTY).decode_threads == 8
    assert resolve(TandemConfig(), SPEC, 1, PLENTY).decode_threads == 1


def test_auto_pages_shrink_to_the_memory() -> None:
    memory = 2 * 2 * 41 * PAGE_BYTES  # two pools, half of it, page 0 included
    assert resolve(TandemConfig(), SPEC, 2, memory).decode_pages == 40


def test_too_little_memory_names_both_sides() -> None:
    with pytest.raises(ConfigError, match=r"0\.3 MiB of K and V, but only 0\.2 MiB") as caught:
        resolve(config(model={"max_context_tokens": 512}), SPEC, 2, 2 * 2 * 30 * PAGE_BYTES)
    assert caught.value.field == "prefill.num_pages"
    with pytest.raises(ConfigError, match=r"1000 pages of K and V take 7\.8 MiB, but only 1\.0"):
        resolve(config(decode={"num_pages": 1000}, prefill={"num_pages": 1}), SPEC, 2, 1 << 20)


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"prefill": {"chunk_tokens": 100}}, "prefill.chunk_tokens"),
        ({"decode": {"buckets": ()}}, "decode.buckets"),
        ({"decode": {"buckets": (2, 2)}}, "decode.buckets"),
        ({"decode": {"buckets": (4, 2)}}, "decode.buckets"),
        ({"decode": {"buckets": (0, 2)}}, "decode.buckets"),
        ({"model": {"max_context_tokens": 513}}, "model.max_context_tokens"),
        ({"model": {"max_context_tokens": 1}}, "model.max_context_tokens"),
        ({"router": {"heartbeat_interval_s": 5.0}}, "router.heartbeat_timeout_s"),
        ({"mode": "colocated", "prefill": {"replicas": 2}}, "prefill.replicas"),
    ],
)
def test_contradictions_are_refused(sections: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(config(**sections), SPEC, 2, PLENTY)
    assert caught.value.field == field


def test_memory_is_the_smaller_of_machine_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:    1000 kB\n")
    assert available_memory_bytes(meminfo, tmp_path) == 1_024_000
    (tmp_path / "memory.current").write_text("500000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(meminfo, tmp_path) == 1_024_000
    (tmp_path / "memory.max").write_text("600000\n")
    assert available_memory_bytes(meminfo, tmp_path) == 100_000
    assert available_memory_bytes(tmp_path / "absent", tmp_path) > 0


def test_this_machine_has_cores() -> None:
    assert usable_cores() >= 1
