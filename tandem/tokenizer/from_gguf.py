"""Builds tokenizer files from a GGUF file's metadata: byte-level BPE, named pre-tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tandem.errors import TokenizerError

_T = TypeVar("_T")

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # llama.cpp's llama_token_type
_SPECIAL = (_UNKNOWN, _CONTROL)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _PreTokenizer:
    """How text is cut into words before merging; each pattern cuts what the ones before it left."""

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    """A word that is a token as a whole is taken as that token."""
    adds_bos: bool = False
    """Whether BOS is added when the file does not say."""
    nfc: bool = False
    """Text is brought into Unicode normalization form C first."""


_PRE_TOKENIZERS = {
    "default": _PreTokenizer(
        patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
    ),
    "gpt-2": _PreTokenizer(patterns=(_GPT2,)),
    "smollm": _PreTokenizer(patterns=(r"\p{N}", _GPT2)),
    "llama-bpe": _PreTokenizer(
        patterns=(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",),
        ignores_merges=True,
        adds_bos=True,
    ),
    "qwen2": _PreTokenizer(patterns=(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), nfc=True),
    "deepseek-v3": _PreTokenizer(
        patterns=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)
    ),
}
"""By the name in `tokenizer.ggml.pre`: the patterns of the models' own tokenizer.json files."""


def tokenizer_files(metadata: Mapping[str, Any], file: str) -> dict[str, str]:
    """Translate a GGUF file's tokenizer.

    Args:
        metadata: of the GGUF file.
        file: its path, for error messages.

    Returns:
        Texts of `tokenizer.json`, `tokenizer_config.json` and, when the file carries a template,
        `chat_template.jinja`.

    Raises:
        TokenizerError: a part is missing or contradicts another, or the kind is not supported.
    """
    reader = _Reader(metadata, file)
    if (model := reader.text("tokenizer.ggml.model")) != "gpt2":
        raise TokenizerError(
            file, f"tokenizer.ggml.model is {model!r}; only 'gpt2' (byte-level BPE) is supported"
        )
    pre_name = reader.text("tokenizer.ggml.pre")
    if pre_name not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise TokenizerError(
            file, f"tokenizer.ggml.pre is {pre_name!r}; the supported ones are: {known}"
        )
    pre = _PRE_TOKENIZERS[pre_name]
    tokens = reader.texts("tokenizer.ggml.tokens")
    bos, eos = reader.named_token("bos", tokens), reader.named_token("eos", tokens)
    adds_bos = reader.flag("tokenizer.ggml.add_bos_token", default=pre.adds_bos)
    adds_eos = reader.flag("tokenizer.ggml.add_eos_token", default=False)
    for name, token, adds in (("bos", bos, adds_bos), ("eos", eos, adds_eos)):
        if adds and token is None:
            raise reader.wrong(
                f"tokenizer.ggml.{name}_token_id", f"is missing, but add_{name}_token is set"
            )
    tokenizer = _build(reader, tokens, pre)
    tokenizer.post_processor = _post_processor(
        tokenizer, bos if adds_bos else None, eos if adds_eos else None
    )
    settings = {
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": reader.named_token("unknown", tokens),
        "pad_token": reader.named_token("padding", tokens),
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=2) + "\n",
    }
    if "tokenizer.chat_template" in metadata:
        files["chat_template.jinja"] = reader.text("tokenizer.chat_template")
    return files


class _Reader:
    """Typed access to metadata; every complaint names file and key."""

    def __init__(self, metadata: Mapping[str, Any], file: str) -> None:
        self.metadata = metadata
        self.file = file

    def text(self, key: str) -> str:
        return self._get(key, str)

    def texts(self, key: str) -> list[str]:
        return self._get(key, list)

    def flag(self, key: str, default: bool) -> bool:
        return self._get(key, bool) if key in self.metadata else default

    def token_types(self, count: int) -> Sequence[int]:
        types = self.metadata.get("tokenizer.ggml.token_type")
        if types is None:
            return [1] * count
        if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu" or len(types) != count:
            raise self.wrong("tokenizer.ggml.token_type", f"must hold {count} integers")
        return [int(kind) for kind in types]

    def named_token(self, name: str, tokens: Sequence[str]) -> str | None:
        token_id = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            return None
        return tokens[token_id]

    def wrong(self, key: str, problem: str) -> TokenizerError:
        return TokenizerError(self.file, f"{key} {problem}")

    def _get(self, key: str, kind: type[_T]) -> _T:
        if key not in self.metadata:
            raise self.wrong(key, "is missing")
        value = self.metadata[key]
        if not isinstance(value, kind):
            raise self.wrong(key, f"must be a {kind.__name__}")
        return value


def _build(reader: _Reader, tokens: Sequence[str], pre: _PreTokenizer) -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise reader.wrong("tokenizer.ggml.tokens", "holds a token twice")
    model = models.BPE(vocab=vocab, merges=_merges(reader, vocab), ignore_merges=pre.ignores_merges)
    tokenizer = Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = reader.token_types(len(tokens))
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in _SPECIAL]
    plain = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return tokenizer


def _merges(reader: _Reader, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in reader.texts("tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise reader.wrong(
                "tokenizer.ggml.merges", f"names tokens that are not there: {line!r}"
            )
        merges.append((left, right))
    return merges


def _post_processor(
    tokenizer: Tokenizer, bos: str | None, eos: str | None
) -> processors.TemplateProcessing | None:
    """What is added around every text."""
    added = [token for token in (bos, eos) if token is not None]
    if not added:
        return None
    return processors.TemplateProcessing(
        single=[token for token in (bos, "$A", eos) if token is not None],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in added],
    )
