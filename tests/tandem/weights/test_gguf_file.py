"""GGUF headers: whatever a file claims, the answer is an error about it and comes quickly."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import WeightsError
from tandem.testing.tiny import write_tiny_llama
from tandem.testing.tiny_gguf import TINY_GGUF_VOCAB_SIZE, write_tiny_gguf
from tandem.weights.gguf_file import GgufFile
from tandem.weights.home import silent
from tandem.weights.unpack import unpack_gguf

UINT32, STRING, ARRAY = 4, 8, 9


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_tiny_llama(folder, vocab_size=TINY_GGUF_VOCAB_SIZE, num_layers=1, hidden=32, num_heads=2)
    write_tiny_gguf(folder / "tiny.gguf", folder, packing="Q8_0")
    return folder / "tiny.gguf"


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    packed = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + packed + struct.pack("<IQ", kind, offset)


def write(
    path: Path, *, keys: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), data: bytes = b""
) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(keys) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def test_header_equals_what_ggufs_reader_finds(good: Path) -> None:
    ours, theirs = GgufFile(good), GGUFReader(good)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            found = ours.metadata[name]
            plain = found if isinstance(found, int | float | str | list) else found.tolist()
            assert plain == field.contents(), name
    expected = {entry.name: entry for entry in theirs.tensors}
    assert ours.tensors.keys() == expected.keys()
    for name, entry in ours.tensors.items():
        assert entry.shape == tuple(int(size) for size in reversed(expected[name].shape))
        assert entry.packing == expected[name].tensor_type
        assert entry.begin == expected[name].data_offset
        assert entry.num_bytes == expected[name].n_bytes
        assert ours.rows(entry).tobytes() == expected[name].data.tobytes()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "cannot be read"),
        (b"GGUF", "too short"),
        (b"GGML" + bytes(60), "no GGUF file"),
        (b"PK\x03\x04" + bytes(60), "no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 100_000, 0), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 60_000), "truncated"),
    ],
)
def test_beginnings_that_are_wrong(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=named) as caught:
        GgufFile(path)
    assert caught.value.file == str(path)


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (struct.pack("<Q", 2**63), "damaged"),
        (struct.pack("<Q", 1000) + b"abc", "truncated"),
        (key(b"\xff\xfe", UINT32, bytes(4)), "UTF-8"),
        (key(b"k", STRING, struct.pack("<Q", 2**63)), "damaged"),
        (key(b"k", 77, bytes(8)), "unsupported type 77"),
        (key(b"k", ARRAY, struct.pack("<IQ", STRING, 2**62)), "array of"),
        (key(b"k", ARRAY, struct.pack("<IQ", UINT32, 2**62)), "truncated"),
        (key(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1)), "unsupported type 9"),
        (key(b"general.alignment", UINT32, struct.pack("<I", 0)), "alignment 0"),
        (key(b"general.alignment", UINT32, struct.pack("<I", 24)), "alignment 24"),
        (key(b"general.alignment", UINT32, struct.pack("<I", 2**31)), "alignment"),
        (key(b"general.alignment", STRING, text(b"32")), "alignment"),
    ],
)
def test_metadata_that_is_wrong(tmp_path: Path, entry: bytes, named: str) -> None:
    with pytest.raises(WeightsError, match=named):
        GgufFile(write(tmp_path / "x.gguf", keys=(entry,)))


def test_the_same_key_twice(tmp_path: Path) -> None:
    entry = key(b"k", UINT32, bytes(4))
    with pytest.raises(WeightsError, match="'k' twice"):
        GgufFile(write(tmp_path / "x.gguf", keys=(entry, entry)))


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ((tensor(b"t", ()),), "0 dimensions"),
        ((tensor(b"t", (1,) * 5),), "5 dimensions"),
        ((text(b"t") + struct.pack("<I", 2**32 - 1),), "dimensions"),
        ((tensor(b"t", (0,)),), "shape"),
        ((tensor(b"t", (2**63, 2**63, 2**63, 2**63)),), "ends at byte"),
        ((tensor(b"t", (2**32, 2**32)),), "ends at byte"),
        ((tensor(b"t", (8,), offset=64),), "ends at byte"),
        ((tensor(b"t", (8,), offset=2**64 - 32),), "ends at byte"),
        ((tensor(b"t", (8,), kind=99),), "unknown type 99"),
        ((tensor(b"t", (33,), kind=8),), r"\[33\] in Q8_0"),
        ((tensor(b"t", (8,)), tensor(b"t", (8,), offset=32)), "twice"),
        ((tensor(b"t", (8,)), tensor(b"u", (8,))), "overlaps"),
    ],
)
def test_tensors_that_are_wrong(tmp_path: Path, entries: tuple[bytes, ...], named: str) -> None:
    with pytest.raises(WeightsError, match=named):
        GgufFile(write(tmp_path / "x.gguf", tensors=entries, data=bytes(64)))


def test_cutting_a_file_anywhere_is_noticed(good: Path, tmp_path: Path) -> None:
    whole = good.read_bytes()
    path = tmp_path / "cut.gguf"
    for keep in range(0, len(whole), 997):
        path.write_bytes(whole[:keep])
        with pytest.raises(WeightsError):
            GgufFile(path)


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_headers_never_crash(
    good: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(good.read_bytes())
    header_bytes = min(entry.begin for entry in GgufFile(good).tensors.values())
    edits = st.tuples(
        st.integers(4, header_bytes - 8),
        st.one_of(
            st.binary(min_size=1, max_size=8),
            st.sampled_from([0, 1, 2**31, 2**32, 2**63, 2**64 - 1]).map(
                lambda number: struct.pack("<Q", number)
            ),
        ),
    )
    for position, replacement in data.draw(st.lists(edits, min_size=1, max_size=3)):
        content[position : position + len(replacement)] = replacement
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "x.gguf").write_bytes(content)
    (folder / "out").mkdir()
    with contextlib.suppress(WeightsError):
        unpack_gguf(folder / "x.gguf", folder / "out", silent)
