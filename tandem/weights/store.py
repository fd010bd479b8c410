"""From a model's name to a folder that workers can open."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import TokenizerError, WeightsError
from tandem.models.spec import ModelSpec, token_ids
from tandem.weights.checkpoint import checkpoint_digest, read_json, read_shards
from tandem.weights.home import Progress, silent, tandem_home

__all__ = ["ModelFolder", "Progress", "open_folder", "prepare", "silent", "tandem_home"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """A checkpoint in Hugging Face form whose files have been checked against one another."""

    path: Path
    """Holds config.json, tokenizer.json, safetensors and perhaps a chat template."""
    name: str
    """Short name: the known model's, the folder's or the .gguf file's."""
    spec: ModelSpec
    weights_digest: str
    """Equal for equal weights; compared by both ends of a K/V transfer."""


def prepare(name: str, progress: Progress = silent) -> ModelFolder:
    """Make a model ready to load.

    Args:
        name: a folder with config.json, tokenizer.json and safetensors.
        progress: told about every step that may take longer than a second.

    Returns:
        The folder to load from.

    Raises:
        WeightsError: the name means nothing, or the model's files cannot be used.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return open_folder(path.resolve())
    raise WeightsError(name, "is neither a model folder nor a .gguf file")


def open_folder(path: Path, name: str = "") -> ModelFolder:
    """Read and check a checkpoint folder without loading its weights.

    Args:
        path: the folder.
        name: its short name; empty takes the folder's.

    Returns:
        The folder with its specification and digest.

    Raises:
        WeightsError: a file is missing, damaged, or asks for something unsupported.
    """
    config_path = path / "config.json"
    spec = ModelSpec.from_hf_config(read_json(config_path), str(config_path))
    if not (path / "tokenizer.json").is_file():
        raise TokenizerError(
            str(path / "tokenizer.json"), "is missing; other tokenizer files are not read"
        )
    shards = read_shards(path)
    return ModelFolder(
        path=path,
        name=name or path.name,
        spec=_with_generation_config(spec, path / "generation_config.json"),
        weights_digest=checkpoint_digest(config_path.read_bytes(), shards),
    )


def _with_generation_config(spec: ModelSpec, path: Path) -> ModelSpec:
    """Chat models often name their end of turn only in generation_config.json."""
    if not path.is_file():
        return spec
    more = token_ids(read_json(path).get("eos_token_id"), "eos_token_id", str(path))
    return dataclasses.replace(spec, eos_token_ids=tuple(sorted({*spec.eos_token_ids, *more})))
