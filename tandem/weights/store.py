"""From a model's name to a folder that workers can open."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import TokenizerError, WeightsError
from tandem.models.spec import ModelSpec, token_ids
from tandem.weights.checkpoint import checkpoint_digest, read_json, read_shards
from tandem.weights.home import Progress, silent, tandem_home
from tandem.weights.llama_tensors import check_llama_tensors
from tandem.weights.prepared import prepared_path, read_manifest, remembered_sha256, unpack_once
from tandem.weights.pull import KNOWN_MODELS, pull

__all__ = ["ModelFolder", "Progress", "open_folder", "prepare", "pull", "silent", "tandem_home"]


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
    weights_bytes: int = 0
    """Bytes of all tensors as they are stored."""


def prepare(name: str, progress: Progress = silent) -> ModelFolder:
    """Make a model ready to load: download, check and unpack what has not been before.

    Args:
        name: a known model's name, a folder with config.json, tokenizer.json and safetensors, or
            a .gguf file.
        progress: told about every step that may take longer than a second.

    Returns:
        The folder to load from.

    Raises:
        WeightsError: the name means nothing, the download fails, the model's files cannot be used,
            or disk or memory do not suffice.
    """
    if name in KNOWN_MODELS:
        return _prepare_known(name, progress)
    path = Path(name).expanduser()
    if path.is_dir():
        return open_folder(path.resolve(), path.name)
    if path.suffix == ".gguf" and path.is_file():
        source = path.resolve()
        folder = unpack_once(source, remembered_sha256(source, progress), progress)
        return open_folder(folder, path.stem)
    known = ", ".join(sorted(KNOWN_MODELS))
    raise WeightsError(name, f"is no model folder, no .gguf file and no known name ({known})")


def _prepare_known(name: str, progress: Progress) -> ModelFolder:
    expected = KNOWN_MODELS[name].sha256
    if read_manifest(prepared_path(expected)) is None:
        source = pull(name, progress)
        found = remembered_sha256(source, progress)
        if found != expected:
            raise WeightsError(
                str(source), f"has sha256 {found}, not {expected}; remove it and start again"
            )
        unpack_once(source, expected, progress)
    return open_folder(prepared_path(expected), name)


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
    tensors = {name: entry for shard in shards for name, entry in shard.tensors.items()}
    shapes = {name: entry.shape for name, entry in tensors.items()}
    check_llama_tensors(spec, shapes, str(path))
    manifest = read_manifest(path)
    return ModelFolder(
        path=path,
        name=name or path.name,
        spec=_with_generation_config(spec, path / "generation_config.json"),
        weights_digest=manifest.weights_digest
        if manifest
        else checkpoint_digest(config_path.read_bytes(), shards),
        weights_bytes=sum(entry.num_bytes for entry in tensors.values()),
    )


def _with_generation_config(spec: ModelSpec, path: Path) -> ModelSpec:
    """Chat models often name their end of turn only in generation_config.json."""
    if not path.is_file():
        return spec
    more = token_ids(read_json(path).get("eos_token_id"), "eos_token_id", str(path))
    return dataclasses.replace(spec, eos_token_ids=tuple(sorted({*spec.eos_token_ids, *more})))
