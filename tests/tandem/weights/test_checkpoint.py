"""Checkpoint files: what is damaged, missing or contradictory is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tandem.errors import MissingTensor, ShapeMismatch, TokenizerError, WeightsError
from tandem.testing.tiny import write_tiny_llama
from tandem.weights.checkpoint import INDEX_NAME, read_shard, read_shards
from tandem.weights.store import open_folder, prepare

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path, sharded=True)
    return tmp_path


def rewrite_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def test_shard_named_by_the_index_is_missing(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    with pytest.raises(WeightsError, match="names it") as caught:
        prepare(str(sharded))
    assert caught.value.file == str(sharded / SECOND)


def test_shard_that_the_index_does_not_name(sharded: Path) -> None:
    save_file({"x": np.zeros(1, np.float32)}, str(sharded / "model-00003-of-00003.safetensors"))
    with pytest.raises(WeightsError, match="is not named"):
        prepare(str(sharded))


def test_tensor_that_its_shard_lacks(sharded: Path) -> None:
    rewrite_index(sharded, lambda weights: weights.update({"extra.weight": FIRST}))
    with pytest.raises(WeightsError, match=r"lacks extra\.weight"):
        prepare(str(sharded))


def test_tensor_that_the_index_puts_elsewhere(sharded: Path) -> None:
    rewrite_index(sharded, lambda weights: weights.update({"model.norm.weight": FIRST}))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        prepare(str(sharded))


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a\\b", 7, ""])
def test_index_may_only_name_files_beside_it(sharded: Path, name: Any) -> None:
    rewrite_index(sharded, lambda weights: weights.update({"x": name}))
    with pytest.raises(WeightsError, match="no file name"):
        prepare(str(sharded))


def test_shards_without_their_index(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    with pytest.raises(WeightsError, match="is missing, but there are shards"):
        prepare(str(sharded))


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, 100_000])
def test_truncated_shard(sharded: Path, keep: int) -> None:
    whole = (sharded / FIRST).read_bytes()
    (sharded / FIRST).write_bytes(whole[:keep])
    with pytest.raises(WeightsError, match="truncated") as caught:
        prepare(str(sharded))
    assert caught.value.file == str(sharded / FIRST)


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (b"{", "damaged header"),
        ([1], "no JSON object"),
        (b"[" * 100_000, "damaged header"),
        ({"x": 3}, "entry for x"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, "entry for x"),
        ({"x": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, "F31"),
        ({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "impossible shape"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "4 bytes"),
        ({"x": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 4]}}, "4 bytes"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, "truncated"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [2**60, 2**60 + 4]}}, "truncated"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path: Path, header: Any, named: str) -> None:
    path = write_raw(tmp_path / "model.safetensors", header, bytes(4))
    with pytest.raises(WeightsError, match=named):
        read_shard(path)


def test_header_longer_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(WeightsError, match="truncated"):
        read_shard(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_checkpoints_are_refused(tmp_path: Path, name: str) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(WeightsError, match="convert it to safetensors") as caught:
        prepare(str(tmp_path))
    assert caught.value.file.endswith(name)


def test_one_file_of_another_name_is_taken(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert [shard.path.name for shard in read_shards(tmp_path)] == ["weights.safetensors"]


def test_no_weights_at_all(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="is missing"):
        prepare(str(tmp_path))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_tensors_are_compared_with_the_configuration(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    change_config(tmp_path, vocab_size=261)
    with pytest.raises(ShapeMismatch, match=r"embed_tokens.*\[260, 64\].*\[261, 64\]"):
        prepare(str(tmp_path))
    change_config(tmp_path, vocab_size=260, num_hidden_layers=3)
    with pytest.raises(MissingTensor, match=r"layers\.2\."):
        prepare(str(tmp_path))
    change_config(tmp_path, num_hidden_layers=2**31 - 1)
    with pytest.raises(MissingTensor, match="layers"):
        prepare(str(tmp_path))
    change_config(tmp_path, num_hidden_layers=2, attention_bias=True)
    with pytest.raises(MissingTensor, match="bias"):
        prepare(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "named"), [(b"", "JSON"), (b"{", "JSON"), (b"[]", "object"), (b"\xff\xfe", "JSON")]
)
def test_broken_config(tmp_path: Path, content: bytes, named: str) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(WeightsError, match=named):
        prepare(str(tmp_path))


def test_tokenizer_and_config_must_be_there(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="is missing"):
        prepare(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(WeightsError, match="cannot be read"):
        prepare(str(tmp_path))


def test_generation_config_adds_end_tokens(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [256, 258]}')
    assert prepare(str(tmp_path)).spec.eos_token_ids == (256, 258)


def test_digest_sees_configuration_and_every_tensor(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    seen = {open_folder(tmp_path).weights_digest}
    change_config(tmp_path, rope_theta=20000.0)
    seen.add(open_folder(tmp_path).weights_digest)
    path = tmp_path / "model.safetensors"
    for entry in read_shard(path).tensors.values():
        content = bytearray(path.read_bytes())
        content[entry.begin + entry.num_bytes - 1] ^= 1
        path.write_bytes(content)
        seen.add(open_folder(tmp_path).weights_digest)
    assert len(seen) == 2 + len(read_shard(path).tensors)
