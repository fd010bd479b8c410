"""Tokenizers from GGUF metadata: equal to llama.cpp's ids, and nothing guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tandem.errors import TokenizerError
from tandem.testing.tiny import TINY_SPECIAL_TOKENS
from tandem.tokenizer.alphabet import byte_alphabet
from tandem.tokenizer.from_gguf import tokenizer_files
from tandem.weights.gguf_file import GgufFile
from tandem.weights.store import prepare, pull

GOLDEN = Path(__file__).parents[2] / "data" / "llama_cpp_token_ids.json"
CONTROL, USER_DEFINED = 3, 4
TOKENS = [*byte_alphabet(), *TINY_SPECIAL_TOKENS, "th", "the", "<extra>"]
GOOD = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": ["t h", "th e"],
    "tokenizer.ggml.token_type": np.array([1] * 256 + [CONTROL] * 4 + [1, 1, USER_DEFINED]),
    "tokenizer.ggml.bos_token_id": 257,
    "tokenizer.ggml.eos_token_id": 258,
}


def build(**changes: Any) -> tokenizers.Tokenizer:
    metadata = {**GOOD, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    files = tokenizer_files({k: v for k, v in metadata.items() if v is not None}, "x.gguf")
    return tokenizers.Tokenizer.from_str(files["tokenizer.json"])


def test_merges_and_added_tokens() -> None:
    tokenizer = build()
    assert tokenizer.encode("the").ids == [261]
    assert tokenizer.encode("a<|im_end|>b<extra>").ids == [97, 258, 98, 262]
    assert tokenizer.decode([97, 258, 98, 262]) == "ab<extra>"


def test_flags_add_bos_and_eos() -> None:
    assert build(add_bos_token=True).encode("a").ids == [257, 97]
    assert build(add_eos_token=True).encode("a").ids == [97, 258]
    assert build(add_bos_token=True, add_eos_token=True).encode("").ids == [257, 258]
    assert build(add_bos_token=True).encode("a", add_special_tokens=False).ids == [97]
    assert build(pre="llama-bpe").encode("a").ids == [257, 97]
    assert build(pre="llama-bpe", add_bos_token=False).encode("a").ids == [97]


def test_whole_words_without_merges() -> None:
    assert build(pre="llama-bpe", add_bos_token=False, merges=["t h"]).encode("the").ids == [261]
    assert build(pre="qwen2", merges=["t h"]).encode("the").ids == [260, 101]


def test_template_and_settings() -> None:
    metadata = {**GOOD, "tokenizer.chat_template": "{{ 1 }}", "tokenizer.ggml.add_bos_token": True}
    files = tokenizer_files(metadata, "x.gguf")
    assert files["chat_template.jinja"] == "{{ 1 }}"
    settings = json.loads(files["tokenizer_config.json"])
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert settings["add_bos_token"] is True
    assert "chat_template.jinja" not in tokenizer_files(GOOD, "x.gguf")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "llama"}, "only 'gpt2'"),
        ({"model": None}, r"tokenizer\.ggml\.model is missing"),
        ({"pre": None}, r"tokenizer\.ggml\.pre is missing"),
        ({"pre": "mystery"}, "'mystery'; the supported ones are: deepseek-v3, default, gpt-2"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"merges": "t h"}, "must be a list"),
        ({"merges": ["t x"]}, "'t x'"),
        ({"merges": ["th"]}, "'th'"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": [*TOKENS[:-1], "a"]}, "twice"),
        ({"token_type": np.array([1, 1])}, "must hold 263 integers"),
        ({"token_type": np.ones(263)}, "must hold 263 integers"),
        ({"add_bos_token": 1}, "must be a bool"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id is missing"),
        ({"add_eos_token": True, "eos_token_id": 9999}, "eos_token_id is missing"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(TokenizerError, match=named) as caught:
        build(**changes)
    assert caught.value.file == "x.gguf"


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert len(content["texts"]) > 200
    return content


@pytest.fixture(scope="session")
def smollm2_metadata() -> dict[str, Any]:
    prepare("smollm2")
    return dict(GgufFile(pull("smollm2")).metadata)


@pytest.mark.weights
@pytest.mark.parametrize("pre", ["smollm", "default", "gpt-2", "llama-bpe", "qwen2", "deepseek-v3"])
def test_ids_equal_those_of_llama_cpp(
    golden: dict[str, Any], smollm2_metadata: dict[str, Any], pre: str
) -> None:
    files = tokenizer_files({**smollm2_metadata, "tokenizer.ggml.pre": pre}, "smollm2")
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    differing = golden["others"].get(pre, {})
    for index, (text, ids) in enumerate(zip(golden["texts"], golden["smollm"], strict=True)):
        expected = differing.get(str(index), ids)
        found = tokenizer.encode(text, add_special_tokens=False).ids
        # llama.cpp leaves out the normalization that Qwen's own tokenizer does
        if not (pre == "qwen2" and text in ("e\u0301", "a\u0300\u0301\u0302")):
            assert found == expected, text
