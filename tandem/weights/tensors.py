"""The tensors of a model folder, memory-mapped and handed out by name."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.errors import MissingTensor, ShapeMismatch, WeightsError
from tandem.weights.checkpoint import Shard, read_shards
from tandem.weights.store import ModelFolder

_CHECKED_ITEMS = 1 << 16


class TensorSource:
    """Hands out each tensor of a checkpoint once it is asked for, and knows what nobody asked for.

    Files stay mapped while tensors from them live; a tensor costs memory only where it is read.
    """

    def __init__(self, folder: ModelFolder, shards: tuple[Shard, ...], readers: list[Any]) -> None:
        self._folder = folder
        self._where = {
            name: (shard, reader)
            for shard, reader in zip(shards, readers, strict=True)
            for name in shard.tensors
        }
        self._asked: set[str] = set()

    @classmethod
    def open(cls, folder: ModelFolder) -> TensorSource:
        """Map all files of ``folder``.

        Raises:
            WeightsError: a file is missing, damaged, or contradicts the index.
        """
        shards = read_shards(folder.path)
        readers = []
        for shard in shards:
            try:
                reader = safe_open(str(shard.path), framework="pt")
            except SafetensorError as problem:
                raise WeightsError(str(shard.path), f"is damaged: {problem}") from problem
            readers.append(reader)
        return cls(folder, shards, readers)

    def names(self) -> frozenset[str]:
        """Names of all tensors in the checkpoint."""
        return frozenset(self._where)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, in the type it is stored in; do not write to it.

        Floating-point values are checked to be finite: all of a small tensor, the first and last
        65,536 of a large one, so that opening a large model stays cheap.

        Args:
            name: as in the checkpoint.
            shape: that the model's configuration calls for.

        Raises:
            MissingTensor: the checkpoint has no such tensor.
            ShapeMismatch: it has another shape.
            WeightsError: it holds NaN or infinity.
        """
        if name not in self._where:
            raise MissingTensor(str(self._folder.path), f"no file holds tensor {name}")
        shard, reader = self._where[name]
        found = shard.tensors[name].shape
        if found != shape:
            raise ShapeMismatch(
                str(shard.path), f"{name} has shape {list(found)}, config.json says {list(shape)}"
            )
        tensor: Tensor = reader.get_tensor(name)
        if not _is_finite(tensor):
            raise WeightsError(str(shard.path), f"{name} holds NaN or infinity")
        self._asked.add(name)
        return tensor

    def unused(self) -> frozenset[str]:
        """Names that `get` was never asked for."""
        return frozenset(self._where) - self._asked


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    flat = tensor.reshape(-1)
    if flat.numel() <= 2 * _CHECKED_ITEMS:
        return bool(torch.isfinite(flat.float()).all())
    ends = torch.cat((flat[:_CHECKED_ITEMS], flat[-_CHECKED_ITEMS:]))
    return bool(torch.isfinite(ends.float()).all())
