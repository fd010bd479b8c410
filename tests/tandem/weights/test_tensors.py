"""Tensors by name: shapes, missing and unused ones, numbers that are none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.errors import MissingTensor, ShapeMismatch, WeightsError
from tandem.testing.tiny import write_tiny_llama
from tandem.weights.store import ModelFolder, prepare
from tandem.weights.tensors import TensorSource


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    write_tiny_llama(tmp_path)
    return prepare(str(tmp_path))


def rewrite(folder: ModelFolder, name: str, tensor: torch.Tensor) -> None:
    path = folder.path / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    save_file({**tensors, name: tensor}, path)


def test_every_tensor_once(folder: ModelFolder) -> None:
    source = TensorSource.open(folder)
    expected = load_file(folder.path / "model.safetensors")
    assert source.names() == expected.keys()
    assert source.unused() == expected.keys()
    for name, tensor in expected.items():
        found = source.get(name, tuple(tensor.shape))
        assert found.dtype == tensor.dtype
        assert found.equal(tensor)
    assert source.unused() == frozenset()


def test_missing_tensor_is_named(folder: ModelFolder) -> None:
    with pytest.raises(MissingTensor, match=r"lm_head\.bias"):
        TensorSource.open(folder).get("lm_head.bias", (260,))


def test_wrong_shape_names_both(folder: ModelFolder) -> None:
    with pytest.raises(ShapeMismatch, match=r"\[64\].*\[65\]") as caught:
        TensorSource.open(folder).get("model.norm.weight", (65,))
    assert caught.value.file.endswith("model.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_none(folder: ModelFolder, value: float, dtype: torch.dtype) -> None:
    norm = torch.ones(64, dtype=dtype)
    norm[33] = value
    rewrite(folder, "model.norm.weight", norm)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight holds NaN"):
        TensorSource.open(folder).get("model.norm.weight", (64,))


def test_ends_of_large_tensors_are_checked(folder: ModelFolder) -> None:
    large = torch.ones(400, 1000)
    large[-1, -1] = float("nan")
    rewrite(folder, "large", large)
    with pytest.raises(WeightsError, match="large"):
        TensorSource.open(folder).get("large", (400, 1000))


def test_whole_numbers_are_not_checked_for_nan(folder: ModelFolder) -> None:
    rewrite(folder, "ids", torch.arange(5))
    assert TensorSource.open(folder).get("ids", (5,)).tolist() == [0, 1, 2, 3, 4]


def test_tensors_outlive_their_source(folder: ModelFolder) -> None:
    source = TensorSource.open(folder)
    norm = source.get("model.norm.weight", (64,))
    expected = norm.clone()
    del source
    assert norm.equal(expected)


def test_shard_lost_after_preparation(folder: ModelFolder) -> None:
    (folder.path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="is missing"):
        TensorSource.open(dataclasses.replace(folder, name="other"))
