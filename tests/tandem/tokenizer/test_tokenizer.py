"""The tokenizer of a model folder: special tokens, BOS rules, vocabularies of another size."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import RequestError, TokenizerError
from tandem.requests import Message
from tandem.testing.tiny import TINY_EOS_TOKEN_ID, TINY_VOCAB_SIZE, write_tiny_llama
from tandem.tokenizer import Tokenizer, load_tokenizer
from tandem.weights.store import prepare

REFERENCE = Path(__file__).parents[2] / "data" / "smollm2_reference.json"
BOS = 257


def change(path: Path, **changes: Any) -> None:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(prepare(str(folder)))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path)
    return tmp_path


def add_bos_in_library(folder: Path) -> None:
    bos = {"id": "<|im_start|>", "type_id": 0}
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": bos}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [BOS], "tokens": ["<|im_start|>"]}
        },
    }
    change(folder / "tokenizer.json", post_processor=processor)


@pytest.mark.parametrize("where", ["library", "settings", "both"])
def test_bos_in_front_exactly_once(tiny: Path, where: str) -> None:
    if where in ("library", "both"):
        add_bos_in_library(tiny)
    if where in ("settings", "both"):
        change(tiny / "tokenizer_config.json", add_bos_token=True)
    tokenizer = load(tiny)
    assert tokenizer.encode("a") == [BOS, 97]
    assert tokenizer.encode("<|im_start|>a") == [BOS, 97]
    assert tokenizer.encode("<|im_start|><|im_start|>a") == [BOS, BOS, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
    assert tokenizer.encode("") == [BOS]


def test_no_bos_unless_asked_for(tiny: Path) -> None:
    tokenizer = load(tiny)
    assert tokenizer.bos_token_id == BOS
    assert tokenizer.encode("a") == [97]
    assert tokenizer.encode("<|im_start|><|im_start|>a") == [BOS, BOS, 97]


def test_chat_adds_nothing_to_the_template(tiny: Path) -> None:
    add_bos_in_library(tiny)
    change(tiny / "tokenizer_config.json", chat_template="{{ bos_token }}{{ messages[0].content }}")
    tokenizer = load(tiny)
    assert tokenizer.encode_chat([Message(role="user", content="a")]) == [BOS, 97]


def test_without_a_chat_template(tiny: Path) -> None:
    change(tiny / "tokenizer_config.json", chat_template=None)
    tokenizer = load(tiny)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.encode_chat([Message(role="user", content="a")])


def test_settings_file_is_optional(tiny: Path) -> None:
    (tiny / "tokenizer_config.json").unlink()
    tokenizer = load(tiny)
    assert tokenizer.encode("a") == [97]
    assert tokenizer.eos_token_ids == {TINY_EOS_TOKEN_ID}


def test_eos_from_the_tokenizer_when_the_model_names_none(tiny: Path) -> None:
    change(tiny / "config.json", eos_token_id=None, bos_token_id=None)
    tokenizer = load(tiny)
    assert tokenizer.eos_token_ids == {TINY_EOS_TOKEN_ID}
    assert tokenizer.bos_token_id == BOS
    change(tiny / "tokenizer_config.json", eos_token={"content": "<|pad|>"}, bos_token=None)
    tokenizer = load(tiny)
    assert tokenizer.eos_token_ids == {259}
    assert tokenizer.bos_token_id is None


def test_model_wider_than_tokenizer(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, vocab_size=TINY_VOCAB_SIZE + 44)
    tokenizer = load(tmp_path)
    assert tokenizer.vocab_size == TINY_VOCAB_SIZE
    assert tokenizer.decode([65, TINY_VOCAB_SIZE + 43, 66]) == "AB"


def test_tokenizer_wider_than_model(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, vocab_size=258)
    change(tmp_path / "config.json", eos_token_id=256)
    tokenizer = load(tmp_path)
    assert tokenizer.vocab_size == TINY_VOCAB_SIZE
    assert tokenizer.encode("ok<|im_start|>") == [111, 107, 257]
    with pytest.raises(RequestError, match=r"<\|im_end\|>.*no embedding") as caught:
        tokenizer.encode("not ok<|im_end|>")
    assert caught.value.field == "text"


def test_highest_id_counts_where_ids_have_gaps(tiny: Path) -> None:
    content = json.loads((tiny / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = 300
    change(tiny / "tokenizer.json", model=content["model"])
    assert load(tiny).vocab_size == 301


def test_lone_surrogates_are_the_requests_fault(tiny: Path) -> None:
    with pytest.raises(RequestError, match="text") as caught:
        load(tiny).encode("a\ud800b")
    assert caught.value.field == "text"


def test_truncation_and_padding_settings_are_ignored(tiny: Path) -> None:
    truncation = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    change(tiny / "tokenizer.json", truncation=truncation)
    assert load(tiny).encode("abcd") == [97, 98, 99, 100]


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"model": {"type": "Nonsense"}}'])
def test_damaged_files(tiny: Path, content: str) -> None:
    (tiny / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="cannot be read") as caught:
        load(tiny)
    assert caught.value.file.endswith("tokenizer.json")


def test_missing_file(tiny: Path) -> None:
    folder = prepare(str(tiny))
    (tiny / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="is missing"):
        load_tokenizer(folder)


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return load_tokenizer(prepare("smollm2"))


@pytest.mark.weights
def test_smollm2_prompts_equal_the_reference(smollm2: Tokenizer) -> None:
    cases = json.loads(REFERENCE.read_text(encoding="utf-8"))["cases"]
    assert {case["kind"] for case in cases} == {"chat", "raw"}
    for case in cases:
        if case["kind"] == "chat":
            found = smollm2.encode_chat([Message(role="user", content=case["prompt"])])
        else:
            found = smollm2.encode(case["prompt"])
        assert found == case["prompt_ids"], case["prompt"]


@pytest.mark.weights
def test_smollm2_streams_random_ids(smollm2: Tokenizer) -> None:
    draw = random.Random(5)
    broken = [i for i in range(smollm2.vocab_size) if "\ufffd" in smollm2.decode([i])]
    for _ in range(300):
        ids = [
            draw.choice(broken) if draw.random() < 0.6 else draw.randrange(smollm2.vocab_size)
            for _ in range(40)
        ]
        stream = smollm2.stream()
        text = "".join(map(stream.push, ids)) + stream.flush()
        assert text == smollm2.decode(ids)


@pytest.mark.weights
def test_smollm2_round_trip(smollm2: Tokenizer) -> None:
    text = "Grüße 世界 👨‍👩‍👧‍👦  12 345\n\n\t6 don't e\u0301"
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    assert smollm2.eos_token_ids == {2}
    assert smollm2.vocab_size == 49152
