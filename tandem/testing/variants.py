"""Changes to a tiny checkpoint: other settings, biases, damaged tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Tensors = dict[str, NDArray[np.float32]]


def edit_config(folder: Path, **fields: Any) -> None:
    """Set fields of ``config.json``."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2))


def edit_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    """Rewrite a single-file checkpoint after ``change`` has edited its tensors."""
    path = str(folder / "model.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def add_biases(folder: Path, seed: int = 0) -> None:
    """Give every attention and MLP projection a random bias."""
    random = np.random.default_rng(seed)

    def add(tensors: Tensors) -> None:
        for name in sorted(tensors):
            if name.endswith("_proj.weight"):
                bias = random.standard_normal(tensors[name].shape[0], dtype=np.float32)
                tensors[name.removesuffix("weight") + "bias"] = np.asarray(
                    0.3 * bias, dtype=np.float32
                )

    edit_tensors(folder, add)
    edit_config(folder, attention_bias=True, mlp_bias=True)
