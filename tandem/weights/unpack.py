"""Unpacks a GGUF file into a Hugging Face checkpoint folder with float32 weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from numpy.typing import NDArray

from tandem.errors import WeightsError
from tandem.models.spec import ModelSpec
from tandem.tokenizer.from_gguf import tokenizer_files
from tandem.weights.gguf_config import ROPE_FACTORS_NAME, hf_config
from tandem.weights.gguf_file import GgufFile, GgufTensor
from tandem.weights.home import Progress, need_disk_space, need_memory
from tandem.weights.llama_tensors import check_llama_tensors, hf_name, llama_tensor_shapes

_BLOCK_ITEMS = 1 << 22
_ITEM_BYTES = 4
_WORK_BYTES = 256 << 20


def unpack_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Write config.json, the tokenizer's files and model.safetensors into ``target``.

    Rows of q and k are brought back into Hugging Face order, where dimension i of a head rotates
    with i + head_dim/2; llama.cpp's converter interleaves them. Every number is checked to be
    finite.

    Args:
        source: the .gguf file.
        target: an existing empty folder.
        progress: told about bytes written.

    Raises:
        WeightsError: the file is damaged or unsupported, or disk or memory do not suffice.
    """
    progress(f"reading {source.name}", 0, 0)
    file = GgufFile(source)
    _check_packings(file)
    config = hf_config(file)
    spec = ModelSpec.from_hf_config(config, str(source))
    tensors = _named_tensors(file)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_llama_tensors(spec, shapes, str(source))
    if extra := sorted(shapes.keys() - llama_tensor_shapes(spec).keys()):
        problem = f"holds {tensors[extra[0]].name}, which the metadata leaves no place for"
        raise WeightsError(str(source), problem)
    num_bytes = sum(_ITEM_BYTES * math.prod(shape) for shape in shapes.values())
    need_disk_space(target, num_bytes, f"unpacking {source.name}")
    need_memory(_WORK_BYTES, f"unpacking {source.name}")
    _write_json(target / "config.json", config)
    for name, content in tokenizer_files(file.metadata, str(source)).items():
        (target / name).write_text(content, encoding="utf-8", newline="")
    with (target / "model.safetensors").open("wb") as output:
        _write_weights(output, file, tensors, spec, progress)


def _named_tensors(file: GgufFile) -> dict[str, GgufTensor]:
    """All weights by Hugging Face name, in file order."""
    tensors = {}
    for tensor in file.tensors.values():
        name = hf_name(tensor.name)
        if name is not None:
            tensors[name] = tensor
        elif tensor.name != ROPE_FACTORS_NAME:
            raise WeightsError(
                str(file.path), f"holds {tensor.name}, which has no place in the llama architecture"
            )
    return tensors


def _check_packings(file: GgufFile) -> None:
    for packing in {tensor.packing for tensor in file.tensors.values()}:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[packing][1]), np.uint8), packing)
        except NotImplementedError as problem:
            raise WeightsError(
                str(file.path), f"packs tensors as {packing.name}, which cannot be read"
            ) from problem


def _write_weights(
    output: BinaryIO,
    file: GgufFile,
    tensors: Mapping[str, GgufTensor],
    spec: ModelSpec,
    progress: Progress,
) -> None:
    output.write(_safetensors_header(tensors))
    total = sum(_ITEM_BYTES * math.prod(tensor.shape) for tensor in tensors.values())
    done = 0
    for name, tensor in tensors.items():
        for block in _float_blocks(file.rows(tensor), tensor, _row_order(name, tensor, spec)):
            if not np.isfinite(block).all():
                raise WeightsError(str(file.path), f"{tensor.name} holds NaN or infinity")
            output.write(np.ascontiguousarray(block, dtype="<f4").data)
            done += _ITEM_BYTES * block.size
            progress(f"unpacking {file.path.name}", done, total)


def _float_blocks(
    packed: NDArray[np.uint8], tensor: GgufTensor, order: NDArray[np.intp] | None
) -> Iterator[NDArray[np.float32]]:
    """The numbers of a tensor, some rows at a time so that memory stays small."""
    step = max(1, _BLOCK_ITEMS // tensor.shape[-1])
    for first in range(0, len(packed), step):
        chosen = slice(first, first + step) if order is None else order[first : first + step]
        with np.errstate(all="ignore"):
            block = dequantize(packed[chosen], tensor.packing)
        yield block


def _row_order(name: str, tensor: GgufTensor, spec: ModelSpec) -> NDArray[np.intp] | None:
    """Where each row of q or k is in the file, in Hugging Face order; None keeps the order.

    A row is packed on its own, so rows can be moved before they are unpacked.
    """
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return None
    pairs = np.arange(heads * spec.head_dim).reshape(heads, spec.head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def _safetensors_header(tensors: Mapping[str, GgufTensor]) -> bytes:
    """Length and JSON header (safetensors format, "Format"), padded to a multiple of 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + _ITEM_BYTES * math.prod(tensor.shape)
        entries[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
