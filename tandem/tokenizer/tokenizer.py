"""Text and chats to token ids, and back, for a model folder's tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from tandem.errors import RequestError, TokenizerError
from tandem.requests import Message
from tandem.tokenizer.chat import ChatTemplate, load_chat_template
from tandem.tokenizer.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    FallbackDetokenizer,
    FallbackRules,
    TokenBytes,
)
from tandem.weights.checkpoint import read_json
from tandem.weights.store import ModelFolder


class Tokenizer:
    """Encodes prompts and decodes output of one model. Safe to share between threads.

    Special tokens written out in a text, such as `<|im_end|>`, become those tokens.
    """

    vocab_size: int
    """One more than the highest token id; the model's logits may be wider."""
    eos_token_ids: frozenset[int]
    """The model's end-of-sequence ids, or the tokenizer's own when the model names none."""
    bos_token_id: int | None
    """Beginning-of-sequence id of the model."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        folder: ModelFolder,
        settings: dict[str, Any],
        template: ChatTemplate | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._model_vocab_size = folder.spec.vocab_size
        eos = self._named_id(settings.get("eos_token"))
        own_eos = () if eos is None else (eos,)
        self.eos_token_ids = frozenset(folder.spec.eos_token_ids or own_eos)
        self.bos_token_id = folder.spec.bos_token_id
        if self.bos_token_id is None:
            self.bos_token_id = self._named_id(settings.get("bos_token"))
        self._library_adds_bos = tokenizer.encode("").ids[:1] == [self.bos_token_id]
        self._settings_add_bos = settings.get("add_bos_token") is True
        self._rules = _fallback_rules(tokenizer, folder.path / "tokenizer.json")
        self._token_bytes = TokenBytes(tokenizer.id_to_token, self._special)

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text; may be empty.
            add_special_tokens: add what the tokenizer adds around every text. Where that is a
                BOS in front, a text that is written with one gets no second.

        Returns:
            The ids, each below the model's vocabulary size.

        Raises:
            RequestError: the text is no valid Unicode or needs a token that the model lacks.
        """
        return self._encode(text, add_special_tokens, "text")

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat, ready for the assistant's turn.

        The template writes its own special tokens; none are added.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        if self._template is None:
            raise RequestError("chat", "this model has no chat template; send text or token_ids")
        return self._encode(self._template.render(messages), False, "chat")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids without a token give no text, broken UTF-8 gives U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream(self) -> Detokenizer:
        """A decoder for one sequence; the sum of what it returns is `decode` of all its ids."""
        if self._rules is None:
            return ByteLevelDetokenizer(self._token_bytes)
        return FallbackDetokenizer(self._rules, self._tokenizer.id_to_token, self._special)

    def _encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as problem:
            raise RequestError(field, f"is not valid Unicode: {problem.reason}") from problem
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self.bos_token_id is not None:
            ids = self._with_bos(ids, self.bos_token_id)
        if self.vocab_size > self._model_vocab_size:
            unknown = next((token for token in ids if token >= self._model_vocab_size), None)
            if unknown is not None:
                token = self._tokenizer.id_to_token(unknown)
                raise RequestError(field, f"holds {token!r}, which the model has no embedding for")
        return ids

    def _with_bos(self, ids: list[int], bos: int) -> list[int]:
        """Add BOS where only the settings ask for it; keep one where library and text both did."""
        if self._library_adds_bos:
            return ids[1:] if ids[:2] == [bos, bos] else ids
        return [bos, *ids] if self._settings_add_bos and ids[:1] != [bos] else ids

    def _named_id(self, named: Any) -> int | None:
        """Id of a token that tokenizer_config.json names, as a string or as {"content": string}."""
        content = named.get("content") if isinstance(named, dict) else named
        if not isinstance(content, str):
            return None
        token_id: int | None = self._tokenizer.token_to_id(content)
        return token_id


def load_tokenizer(folder: ModelFolder) -> Tokenizer:
    """Load a model folder's tokenizer and chat template.

    Raises:
        TokenizerError: a file is missing, damaged, or of a kind that Tandem cannot decode exactly.
    """
    path = folder.path / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(str(path), "is missing")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises nothing more specific
        raise TokenizerError(str(path), f"cannot be read: {problem}") from problem
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings_path = folder.path / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.is_file() else {}
    return Tokenizer(tokenizer, folder, settings, load_chat_template(folder.path, settings))


def _fallback_rules(tokenizer: tokenizers.Tokenizer, path: Path) -> FallbackRules | None:
    """How tokens become text; None for byte-level vocabularies.

    Raises:
        TokenizerError: the decoder is of neither kind.
    """
    decoder: Any = tokenizer.decoder
    state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder else {"type": "none"}
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return None
    replacements: list[tuple[str, str]] = []
    strip, strip_count = "", 0
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        replacements.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        steps = steps[1:]
    if len(steps) == 3 and steps[2]["type"] == "Strip" and steps[2]["stop"] == 0:
        strip, strip_count = steps[2]["content"], steps[2]["start"]
        steps = steps[:2]
    if [step["type"] for step in steps] != ["ByteFallback", "Fuse"]:
        raise TokenizerError(
            str(path), f"decoder {'+'.join(kinds)} is not supported; ByteLevel and ByteFallback are"
        )
    return FallbackRules(replacements=tuple(replacements), strip=strip, strip_count=strip_count)
