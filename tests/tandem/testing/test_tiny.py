"""The tiny checkpoint that other tests stand on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.models.spec import ModelSpec
from tandem.requests import Message
from tandem.testing.tiny import TINY_EOS_TOKEN_ID, TINY_VOCAB_SIZE, write_tiny_llama
from tandem.tokenizer import load_tokenizer
from tandem.weights.store import prepare
from tandem.weights.tensors import TensorSource


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tiny_llama(tmp_path / name, seed=3)
    write_tiny_llama(tmp_path / "c", seed=4)
    a, b, c = (prepare(str(tmp_path / name)).weights_digest for name in "abc")
    assert a == b
    assert a != c


def test_sharded_and_single_hold_the_same_tensors(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "single")
    write_tiny_llama(tmp_path / "sharded", sharded=True)
    sources = [TensorSource.open(prepare(str(tmp_path / name))) for name in ("single", "sharded")]
    assert sources[0].names() == sources[1].names()
    norms = [source.get("model.norm.weight", (64,)) for source in sources]
    assert norms[0].equal(norms[1])
    assert not list((tmp_path / "sharded").glob("model.safetensors"))


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_those_asked_for(tmp_path: Path, tied: bool) -> None:
    write_tiny_llama(
        tmp_path,
        vocab_size=300,
        num_layers=3,
        hidden=96,
        num_heads=6,
        num_kv_heads=3,
        max_context=77,
        tie_embeddings=tied,
    )
    spec: ModelSpec = prepare(str(tmp_path)).spec
    assert (spec.vocab_size, spec.num_layers, spec.hidden_size) == (300, 3, 96)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (6, 3, 16)
    assert (spec.max_context_tokens, spec.tie_embeddings) == (77, tied)


def test_bytes_are_their_own_ids(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    tokenizer = load_tokenizer(prepare(str(tmp_path)))
    text = "Grüße, 世界 <|im_end|>"
    assert tokenizer.encode(text) == [*text.removesuffix("<|im_end|>").encode(), TINY_EOS_TOKEN_ID]
    assert tokenizer.vocab_size == TINY_VOCAB_SIZE
    assert tokenizer.eos_token_ids == {TINY_EOS_TOKEN_ID}


def test_chat_template_works(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    tokenizer = load_tokenizer(prepare(str(tmp_path)))
    ids = tokenizer.encode_chat([Message(role="user", content="hi")])
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
