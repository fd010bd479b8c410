"""Streaming text: nothing lost, nothing doubled, no half characters, whatever the ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import TokenizerError
from tandem.testing.tiny import TINY_VOCAB_SIZE, write_tiny_llama
from tandem.tokenizer import Tokenizer, load_tokenizer
from tandem.weights.store import prepare

LEADS = (0x41, 0x7F, 0x80, 0xBF, 0xC0, 0xC2, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0x9F, 0x98, 0xF5)
byte_ids = st.one_of(st.sampled_from(LEADS), st.integers(0, TINY_VOCAB_SIZE + 3))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_tiny_llama(folder)
    add_tokens(folder, ["\u65e5\u672c", "a b", "\u00e9\u0142"])
    return load_tokenizer(prepare(str(folder)))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As Llama 2's tokenizer.json: spaces as U+2581, `<0xE2>` for bytes without a piece."""
    folder = tmp_path_factory.mktemp("fallback")
    write_tiny_llama(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    pieces = ["\u2581", "\u2581\u2581", "\u2581a", "b", "\u00e9", "\u65e5", "<0x", "x>"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {token["content"]: token["id"] for token in content["added_tokens"]}
    vocab |= {piece: TINY_VOCAB_SIZE + index for index, piece in enumerate(pieces)}
    content["model"] = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True}
    content["pre_tokenizer"] = None
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    path.write_text(json.dumps(content))
    return load_tokenizer(prepare(str(folder)))


def add_tokens(folder: Path, contents: list[str]) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    like = tokenizer["added_tokens"][0]
    for index, content in enumerate(contents):
        token = {**like, "id": TINY_VOCAB_SIZE + index, "content": content, "special": False}
        tokenizer["added_tokens"].append(token)
    path.write_text(json.dumps(tokenizer))


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


@settings(max_examples=500)
@given(ids=st.lists(byte_ids, max_size=60))
def test_bytes_add_up(byte_level: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces_of(byte_level, ids)) == byte_level.decode(ids)


@settings(max_examples=500)
@given(ids=st.lists(st.integers(0, TINY_VOCAB_SIZE + 9), max_size=60))
def test_fallback_adds_up(fallback: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces_of(fallback, ids)) == fallback.decode(ids)


@given(text=st.text(max_size=40))
def test_characters_come_whole_and_at_once(byte_level: Tokenizer, text: str) -> None:
    stream = byte_level.stream()
    for character in text:
        encoded = character.encode()
        said = [stream.push(byte) for byte in encoded]
        assert said == [""] * (len(encoded) - 1) + [character]
    assert stream.flush() == ""


def test_replacement_only_where_decode_has_it(byte_level: Tokenizer) -> None:
    assert pieces_of(byte_level, [0xE2, 0x82]) == ["", "", "\ufffd"]
    assert pieces_of(byte_level, [0xE2, 0x82, 0x41]) == ["", "", "\ufffdA", ""]
    assert pieces_of(byte_level, [0xFF, 0x41]) == ["\ufffd", "A", ""]


def test_special_tokens_do_not_cut_a_character(byte_level: Tokenizer) -> None:
    assert pieces_of(byte_level, [0xE2, 256, 0x82, 258, 0xAC]) == ["", "", "", "", "\u20ac", ""]


def test_ids_without_a_token_give_nothing(byte_level: Tokenizer) -> None:
    assert pieces_of(byte_level, [0x41, 10**6, 0x42]) == ["A", "", "B", ""]


def test_fallback_strips_one_space_in_front(fallback: Tokenizer) -> None:
    space, two, a = TINY_VOCAB_SIZE, TINY_VOCAB_SIZE + 1, TINY_VOCAB_SIZE + 2
    assert "".join(pieces_of(fallback, [a, a])) == "a a"
    assert "".join(pieces_of(fallback, [two, a])) == "  a"
    assert "".join(pieces_of(fallback, [space, space, a])) == "  a"


def test_unknown_decoders_are_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    path = tmp_path / "tokenizer.json"
    for decoder in (None, {"type": "WordPiece", "prefix": "##", "cleanup": True}):
        path.write_text(json.dumps({**json.loads(path.read_text()), "decoder": decoder}))
        with pytest.raises(TokenizerError, match="decoder"):
            load_tokenizer(prepare(str(tmp_path)))
