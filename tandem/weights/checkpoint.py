"""The files of a Hugging Face checkpoint, checked against one another without reading weights."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import WeightsError

INDEX_NAME = "model.safetensors.index.json"

_MAX_JSON_BYTES = 256 << 20
_MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors library itself
_ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}
_SHARD_NAME = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor as a safetensors header declares it."""

    dtype: str
    """The format's own name, such as `F32`."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the start of the file."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One safetensors file."""

    path: Path
    header: bytes
    tensors: dict[str, TensorEntry]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        WeightsError: the file is missing, unreadable, huge or holds no JSON object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise WeightsError(str(path), f"is larger than {_MAX_JSON_BYTES >> 20} MiB")
        content = json.loads(path.read_bytes())
    except OSError as problem:
        raise WeightsError(str(path), f"cannot be read: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise WeightsError(str(path), f"is not JSON: {problem}") from problem
    if not isinstance(content, dict):
        raise WeightsError(str(path), "holds no JSON object")
    return content


def read_shard(path: Path) -> Shard:
    """Read and check one safetensors header (safetensors format, "Format").

    Raises:
        WeightsError: the file is truncated or its header contradicts itself or the file's size.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise WeightsError(
                    str(path), f"is truncated ({file_bytes} bytes) or no safetensors"
                )
            header = file.read(header_bytes)
    except OSError as problem:
        raise WeightsError(str(path), f"cannot be read: {problem.strerror}") from problem
    try:
        declared = json.loads(header)
    except (ValueError, RecursionError) as problem:
        raise WeightsError(str(path), f"has a damaged header: {problem}") from problem
    if not isinstance(declared, dict):
        raise WeightsError(str(path), "has a damaged header: no JSON object")
    start = 8 + header_bytes
    tensors = {
        name: _tensor_entry(path, name, fields, start, file_bytes)
        for name, fields in declared.items()
        if name != "__metadata__"
    }
    return Shard(path=path, header=header, tensors=tensors)


def _tensor_entry(path: Path, name: str, fields: Any, start: int, file_bytes: int) -> TensorEntry:
    match fields:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise WeightsError(str(path), f"has a damaged header entry for {name}")
    if dtype not in _ITEM_BITS:
        raise WeightsError(str(path), f"{name} has the unsupported type {dtype!r}")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise WeightsError(str(path), f"{name} has the impossible shape {shape}")
    if not 0 <= begin <= end or start + end > file_bytes:
        raise WeightsError(
            str(path),
            f"is truncated: {name} ends at byte {start + end}, the file at {file_bytes}",
        )
    if math.prod(shape) * _ITEM_BITS[dtype] != 8 * (end - begin):
        raise WeightsError(str(path), f"{name} has shape {shape} but {end - begin} bytes")
    return TensorEntry(dtype=dtype, shape=tuple(shape), begin=start + begin, num_bytes=end - begin)


def read_shards(folder: Path) -> tuple[Shard, ...]:
    """All safetensors files of a checkpoint, checked against the index in both directions.

    Args:
        folder: with one `*.safetensors` file, or several and `model.safetensors.index.json`.

    Returns:
        The shards by name; every tensor is in exactly one of them.

    Raises:
        WeightsError: a file is missing, damaged or not in the index; a tensor is in none, two, or
            another file than the index says; or the weights are pickled.
    """
    if (folder / INDEX_NAME).exists():
        return _indexed_shards(folder)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in names:
        names = [name for name in names if _SHARD_NAME.fullmatch(name)]
    if len(names) == 1 and "-of-" not in names[0]:
        return (read_shard(folder / names[0]),)
    if names:
        listed = ", ".join(names[:4])
        raise WeightsError(str(folder / INDEX_NAME), f"is missing, but there are shards: {listed}")
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise WeightsError(
            str(folder / pickled[0]),
            "is a pickled checkpoint, which can run code when it is read; "
            "convert it to safetensors and remove it",
        )
    raise WeightsError(str(folder / "model.safetensors"), "is missing")


def _indexed_shards(folder: Path) -> tuple[Shard, ...]:
    index = folder / INDEX_NAME
    weight_map = _weight_map(index)
    named = set(weight_map.values())
    for name in sorted(named):
        if not (folder / name).is_file():
            raise WeightsError(str(folder / name), f"is missing, but {INDEX_NAME} names it")
    for path in sorted(folder.glob("*.safetensors")):
        if _SHARD_NAME.fullmatch(path.name) and path.name not in named:
            raise WeightsError(str(path), f"is not named by {INDEX_NAME}: remove it or the index")
    shards = tuple(read_shard(folder / name) for name in sorted(named))
    for shard in shards:
        here = {tensor for tensor, name in weight_map.items() if name == shard.path.name}
        if missing := sorted(here - shard.tensors.keys()):
            raise WeightsError(str(shard.path), f"lacks {missing[0]}, which {INDEX_NAME} puts here")
        if extra := sorted(shard.tensors.keys() - here):
            raise WeightsError(
                str(shard.path), f"holds {extra[0]}, which {INDEX_NAME} puts elsewhere"
            )
    return shards


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(str(index), "has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or not name or Path(name).name != name or "\\" in name:
            raise WeightsError(str(index), f"names {name!r}, which is no file name in this folder")
    return weight_map


def checkpoint_digest(config: bytes, shards: tuple[Shard, ...]) -> str:
    """A name for these exact weights that is quick to compute for any size.

    SHA-256 over `config.json`, every safetensors header, and of every tensor the first and last
    4 KiB and 4 KiB from its middle. Two trainings of one model differ in nearly every
    weight, so they differ here; a single changed byte inside a large tensor may go unseen.
    """
    digest = hashlib.sha256()
    _update_framed(digest, config)
    for shard in shards:
        _update_framed(digest, shard.header)
        with shard.path.open("rb") as file:
            for entry in sorted(shard.tensors.values(), key=lambda entry: entry.begin):
                last = max(entry.num_bytes - _SAMPLE_BYTES, 0)
                for offset in sorted({0, last // 2, last}):
                    file.seek(entry.begin + offset)
                    digest.update(file.read(min(_SAMPLE_BYTES, entry.num_bytes)))
    return digest.hexdigest()


def _update_framed(digest: Any, content: bytes) -> None:
    digest.update(len(content).to_bytes(8, "little"))
    digest.update(content)
