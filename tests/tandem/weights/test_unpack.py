"""Unpacking GGUF: numbers, row order and configuration come out as Hugging Face has them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

from tandem.errors import MissingTensor, ShapeMismatch, WeightsError
from tandem.testing.tiny import write_tiny_llama
from tandem.testing.tiny_gguf import TINY_GGUF_VOCAB_SIZE, write_tiny_gguf
from tandem.tokenizer import load_tokenizer
from tandem.weights import unpack
from tandem.weights.gguf_config import hf_config
from tandem.weights.gguf_file import GgufFile
from tandem.weights.home import silent
from tandem.weights.store import open_folder
from tandem.weights.unpack import unpack_gguf


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path / "hf", vocab_size=TINY_GGUF_VOCAB_SIZE)
    return tmp_path / "hf"


def convert(tiny: Path, **options: Any) -> Path:
    source = tiny.parent / "tiny.gguf"
    write_tiny_gguf(source, tiny, **options)
    target = tiny.parent / "unpacked"
    target.mkdir()
    unpack_gguf(source, target, silent)
    return target


@pytest.mark.parametrize("tied", [False, True])
def test_float32_comes_back_bit_by_bit(tmp_path: Path, tied: bool) -> None:
    hf = tmp_path / "hf"
    write_tiny_llama(hf, vocab_size=TINY_GGUF_VOCAB_SIZE, tie_embeddings=tied)
    expected = load_file(hf / "model.safetensors")
    found = load_file(convert(hf) / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("packing", "bits"), [("F16", 10), ("BF16", 8), ("Q8_0", 6), ("Q5_1", 3), ("Q4_1", 2)]
)
def test_packed_numbers_come_back_nearly(tiny: Path, packing: str, bits: int) -> None:
    expected = load_file(tiny / "model.safetensors")
    found = load_file(convert(tiny, packing=packing) / "model.safetensors")
    for name, tensor in expected.items():
        assert found[name].dtype == np.float32
        assert np.abs(found[name] - tensor).max() <= np.abs(tensor).max() * 2.0**-bits, name


def test_spec_equals_that_of_the_original(tiny: Path) -> None:
    original, unpacked = open_folder(tiny).spec, open_folder(convert(tiny)).spec
    assert unpacked.rms_norm_eps == pytest.approx(original.rms_norm_eps, rel=1e-7)
    for field in ("rope", "eos_token_ids", "bos_token_id", "num_kv_heads", "tie_embeddings"):
        assert getattr(unpacked, field) == getattr(original, field)


def test_small_blocks_change_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "_BLOCK_ITEMS", 300)
    expected = load_file(tiny / "model.safetensors")
    found = load_file(convert(tiny) / "model.safetensors")
    for name, tensor in expected.items():
        assert np.array_equal(found[name], tensor), name


def test_progress_reaches_the_end(tiny: Path, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "t.gguf", tiny)
    (tmp_path / "out").mkdir()
    seen: list[tuple[str, int, int]] = []
    unpack_gguf(tmp_path / "t.gguf", tmp_path / "out", lambda *step: seen.append(step))
    assert seen[-1][1] == seen[-1][2] > 0


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general.architecture": "qwen2"}, "supported ones are: llama"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 0}, "llama.block_count"),
        ({"llama.block_count": 2.5}, "llama.block_count"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count"),
        ({"llama.attention.head_count": 3}, "hidden_size|dimension_count"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "epsilon"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon"),
        ({"llama.expert_count": 8}, "expert"),
        ({"llama.rope.scaling.type": "yarn"}, "scaling"),
        ({"split.count": 3}, "one part of several"),
        ({"tokenizer.ggml.eos_token_id": "end"}, "eos_token_id"),
    ],
)
def test_metadata_that_cannot_be_used(tiny: Path, metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(WeightsError, match=named) as caught:
        convert(tiny, metadata=metadata)
    assert caught.value.file.endswith("tiny.gguf")


def test_missing_and_misshapen_tensors(tiny: Path) -> None:
    with pytest.raises(MissingTensor, match=r"layers\.2"):
        convert(tiny, metadata={"llama.block_count": 3})
    (tiny.parent / "unpacked").rmdir()
    with pytest.raises(ShapeMismatch, match="mlp"):
        convert(tiny, metadata={"llama.feed_forward_length": 64})


def test_layers_that_the_metadata_leaves_out(tiny: Path) -> None:
    with pytest.raises(WeightsError, match=r"blk\.1\."):
        convert(tiny, metadata={"llama.block_count": 1})


def test_linear_rope_scaling(tiny: Path) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    rope = open_folder(convert(tiny, metadata=metadata)).spec.rope
    assert json.loads(rope.scaling) == {"rope_type": "linear", "factor": 2.0}


def test_absent_end_of_sequence(tiny: Path) -> None:
    metadata = {"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.eot_token_id": 2**32 - 1}
    assert open_folder(convert(tiny, metadata=metadata)).spec.eos_token_ids == ()


def test_end_of_turn_ends_too(tiny: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 256}
    assert open_folder(convert(tiny, metadata=metadata)).spec.eos_token_ids == (256, 258)


def test_packing_that_gguf_cannot_read(tiny: Path) -> None:
    source = tiny.parent / "int8.gguf"
    write_tiny_gguf(source, tiny)
    content = bytearray(source.read_bytes())
    name = b"output_norm.weight"
    packing_at = content.index(name) + len(name) + 4 + 8
    content[packing_at : packing_at + 4] = int(GGMLQuantizationType.I8).to_bytes(4, "little")
    source.write_bytes(content)
    (tiny.parent / "out").mkdir()
    with pytest.raises(WeightsError, match="packs tensors as I8"):
        unpack_gguf(source, tiny.parent / "out", silent)


def test_no_chat_template(tiny: Path) -> None:
    target = convert(tiny, metadata={"tokenizer.chat_template": None})
    assert not (target / "chat_template.jinja").exists()
    assert not load_tokenizer(open_folder(target)).has_chat_template


def test_nan_is_found(tiny: Path) -> None:
    write_tiny_gguf(tiny.parent / "nan.gguf", tiny)
    content = bytearray((tiny.parent / "nan.gguf").read_bytes())
    entry = GgufFile(tiny.parent / "nan.gguf").tensors["blk.1.ffn_up.weight"]
    content[entry.begin + 400 : entry.begin + 404] = np.float32("nan").tobytes()
    (tiny.parent / "nan.gguf").write_bytes(content)
    (tiny.parent / "out").mkdir()
    with pytest.raises(WeightsError, match=r"blk\.1\.ffn_up\.weight holds NaN"):
        unpack_gguf(tiny.parent / "nan.gguf", tiny.parent / "out", silent)


def test_little_disk_space_is_noticed_before(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1 << 20

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(WeightsError, match=r"needs \d+ MiB of disk and 1 MiB are free"):
        convert(tiny)
    assert not list((tiny.parent / "unpacked").iterdir())


LLAMA31_FACTORS = "rope_freqs.weight"


def with_rope_factors(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, factors: list[float]
) -> GgufFile:
    write_tiny_gguf(tiny.parent / "f.gguf", tiny, metadata={"llama.rope.freq_base": 5e5})
    file = GgufFile(tiny.parent / "f.gguf")
    like = file.tensors["output_norm.weight"]
    file.tensors[LLAMA31_FACTORS] = like
    packed = np.array([factors], np.float32).view(np.uint8)
    monkeypatch.setattr(file, "rows", lambda _: packed)
    return file


def test_llama31_factors_become_parameters(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 1 / (scaled / plain) for theta 500000, head size 16, factor 8: transformers' llama3 numbers
    plain = [5e5 ** (-pair / 8) for pair in range(8)]
    scaled = [1.0, 0.193922758102417, 0.03760603070259094, 0.00729266507551074]
    scaled += [0.0005248460220173001, 3.428102354519069e-05]
    scaled += [6.647869668086059e-06, 1.289173155782919e-06]
    factors = [whole / part for whole, part in zip(plain, scaled, strict=True)]
    scaling = hf_config(with_rope_factors(tiny, monkeypatch, factors))["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert scaling["factor"] == pytest.approx(8, rel=1e-5)


@pytest.mark.parametrize("factors", [[2.0] * 8, [1.0] * 7, [float("nan")] * 8, [0.0] * 8])
def test_other_factors_are_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, factors: list[float]
) -> None:
    with pytest.raises(WeightsError, match="rope_freqs"):
        hf_config(with_rope_factors(tiny, monkeypatch, factors))
