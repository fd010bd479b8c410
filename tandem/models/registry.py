"""From a model folder to a loaded model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.config.tree import WeightsDtype
from tandem.models.llama import load_llama
from tandem.models.model import Model
from tandem.ops.native import load_native
from tandem.weights.store import ModelFolder, Progress, silent

_LOADERS: dict[str, Callable[[ModelFolder, torch.dtype, Progress], Model]] = {"llama": load_llama}
_DTYPES = {
    "auto": torch.float32,  # exact, and as fast as the CPU reads it
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


def load_model(folder: ModelFolder, dtype: WeightsDtype, progress: Progress = silent) -> Model:
    """Load the CPU kernels and a model's weights.

    Args:
        folder: an opened checkpoint.
        dtype: precision of the weights; auto is float32 on the CPU.
        progress: told about compiling and loading.

    Returns:
        The model.

    Raises:
        WeightsError: the checkpoint and its configuration do not fit together.
    """
    load_native(progress)
    return _LOADERS[folder.spec.architecture](folder, _DTYPES[dtype], progress)
