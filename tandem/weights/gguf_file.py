"""Reads the header of a GGUF file; whatever the file claims, work and memory stay bounded.

The layout is that of the GGUF specification, version 3; version 2 is the same where it matters.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from tandem.errors import WeightsError

MetadataValue = int | float | bool | str | list[str] | NDArray[Any]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_TENSORS = 1 << 17
_MAX_KEYS = 1 << 16
_MAX_NAME_BYTES = 1 << 16
_MAX_ARRAY_STRINGS = 1 << 22
_MAX_TEXT_BYTES = 1 << 28  # all names and strings of a header together
_MAX_DIMENSIONS = 4
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Value type -> letter, alike in struct and numpy."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """Where one tensor is and how its numbers are packed."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as numpy and torch count; the file counts the other way round."""
    packing: GGMLQuantizationType
    begin: int
    """First byte, counted from the start of the file."""
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; rows are packed one by one."""
        return self.num_bytes // math.prod(self.shape[:-1])


class GgufFile:
    """An open, memory-mapped GGUF file whose header has been checked against its size."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its header.

        Raises:
            WeightsError: it is no GGUF file, is truncated, or contradicts itself.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as problem:
            raise WeightsError(str(path), f"cannot be read: {problem}") from problem
        cursor = _Cursor(self._map, path)
        num_tensors, num_keys = _read_preamble(cursor)
        self.metadata = _read_metadata(cursor, num_keys)
        infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
        start = _data_start(cursor, self.metadata)
        self.tensors = _place_tensors(infos, start, len(self._map), path)

    def rows(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The packed bytes of a tensor, one row of the array per row of the tensor."""
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.begin)
        return raw.reshape(-1, tensor.row_bytes)


class _Cursor:
    """A position in the mapped file that never passes its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.offset = 0
        self._text_bytes_left = _MAX_TEXT_BYTES

    @property
    def left(self) -> int:
        return len(self._data) - self.offset

    def wrong(self, problem: str) -> WeightsError:
        return WeightsError(str(self._path), f"{problem} (near byte {self.offset})")

    def skip(self, num_bytes: int) -> int:
        """Step over ``num_bytes`` and return where they begin."""
        begin = self.offset
        if num_bytes > self.left:
            raise self.wrong(f"is truncated or damaged: {num_bytes} bytes wanted, {self.left} left")
        self.offset += num_bytes
        return begin

    def scalar(self, code: str) -> Any:
        layout = f"<{code}"
        return struct.unpack_from(layout, self._data, self.skip(struct.calcsize(layout)))[0]

    def text(self, max_bytes: int = _MAX_TEXT_BYTES) -> str:
        num_bytes = self.scalar("Q")
        if num_bytes > min(max_bytes, self._text_bytes_left):
            raise self.wrong(f"is damaged: a text of {num_bytes} bytes")
        self._text_bytes_left -= num_bytes
        begin = self.skip(num_bytes)
        try:
            return self._data[begin : begin + num_bytes].decode("utf-8")
        except UnicodeDecodeError as problem:
            raise self.wrong("is damaged: text that is not UTF-8") from problem

    def array(self) -> MetadataValue:
        item_type, count = self.scalar("I"), self.scalar("Q")
        if item_type == _STRING:
            if count > min(_MAX_ARRAY_STRINGS, self.left // 8):
                raise self.wrong(f"is damaged: an array of {count} strings")
            return [self.text() for _ in range(count)]
        if item_type not in _SCALARS:
            raise self.wrong(f"has an array of unsupported type {item_type}")
        dtype = np.dtype(_SCALARS[item_type]).newbyteorder("<")
        return np.frombuffer(self._data, dtype, count, self.skip(count * dtype.itemsize))


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    if cursor.left < 24:
        raise cursor.wrong("is too short for a GGUF file")
    if (magic := struct.pack("<I", cursor.scalar("I"))) != _MAGIC:
        raise cursor.wrong(f"is no GGUF file: it begins with {magic!r}")
    if (version := cursor.scalar("I")) not in _VERSIONS:
        raise cursor.wrong(f"has GGUF version {version}; 2 and 3 (little-endian) are supported")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
        raise cursor.wrong(f"is damaged: it claims {num_tensors} tensors and {num_keys} keys")
    return num_tensors, num_keys


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for _ in range(num_keys):
        key, value_type = cursor.text(_MAX_NAME_BYTES), cursor.scalar("I")
        if key in metadata:
            raise cursor.wrong(f"has the key {key!r} twice")
        if value_type == _STRING:
            metadata[key] = cursor.text()
        elif value_type == _ARRAY:
            metadata[key] = cursor.array()
        elif value_type in _SCALARS:
            metadata[key] = cursor.scalar(_SCALARS[value_type])
        else:
            raise cursor.wrong(f"has unsupported type {value_type} for key {key!r}")
    return metadata


def _read_tensor_info(cursor: _Cursor) -> GgufTensor:
    """Read one entry; ``begin`` still counts from the start of the data."""
    name, num_dims = cursor.text(_MAX_NAME_BYTES), cursor.scalar("I")
    if not 1 <= num_dims <= _MAX_DIMENSIONS:
        raise cursor.wrong(f"is damaged: {name!r} has {num_dims} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    packing_id, begin = cursor.scalar("I"), cursor.scalar("Q")
    try:
        packing = GGMLQuantizationType(packing_id)
        block_items, block_bytes = GGML_QUANT_SIZES[packing]
    except (ValueError, KeyError) as problem:
        raise cursor.wrong(f"packs {name!r} in the unknown type {packing_id}") from problem
    if min(shape) < 1 or shape[-1] % block_items:
        raise cursor.wrong(f"is damaged: {name!r} has shape {list(shape)} in {packing.name}")
    num_bytes = math.prod(shape) // block_items * block_bytes
    return GgufTensor(name=name, shape=shape, packing=packing, begin=begin, num_bytes=num_bytes)


def _data_start(cursor: _Cursor, metadata: Mapping[str, MetadataValue]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    is_power = isinstance(alignment, int) and alignment > 0 and alignment & (alignment - 1) == 0
    if not isinstance(alignment, int) or not is_power or alignment > _MAX_ALIGNMENT:
        raise cursor.wrong(f"has the impossible general.alignment {alignment!r}")
    return -(-cursor.offset // alignment) * alignment


def _place_tensors(
    infos: list[GgufTensor], start: int, file_bytes: int, path: Path
) -> dict[str, GgufTensor]:
    placed: dict[str, GgufTensor] = {}
    free_from = 0
    for info in sorted(infos, key=lambda info: info.begin):
        begin, end = start + info.begin, start + info.begin + info.num_bytes
        if end > file_bytes:
            raise WeightsError(
                str(path),
                f"is truncated: {info.name} ends at byte {end}, the file at {file_bytes}",
            )
        if info.name in placed or begin < free_from:
            raise WeightsError(str(path), f"is damaged: {info.name} is there twice or overlaps")
        free_from = end
        placed[info.name] = GgufTensor(
            name=info.name,
            shape=info.shape,
            packing=info.packing,
            begin=begin,
            num_bytes=info.num_bytes,
        )
    return placed
