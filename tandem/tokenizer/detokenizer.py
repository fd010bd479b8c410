"""Token ids to text, one at a time: text leaves as soon as no later token can change it."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from tandem.tokenizer.alphabet import byte_alphabet

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """One sequence's text; what `push` and `flush` return adds up to the decoding of all ids."""

    def push(self, token_id: int) -> str:
        """Take the next token.

        Returns:
            Text that became final; often empty while a character is incomplete.
        """

    def flush(self) -> str:
        """End the sequence.

        Returns:
            What was still held back; bytes that never became a character show as U+FFFD.
        """


class TokenBytes:
    """The bytes of each token in a byte-level vocabulary, worked out once per token."""

    def __init__(self, to_token: Callable[[int], str | None], skipped: Collection[int]) -> None:
        self._to_token = to_token
        self._known: dict[int, bytes] = dict.fromkeys(skipped, b"")
        self._byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}

    def __getitem__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            token = self._to_token(token_id)
            if token is None:
                return b""
            found = self._known[token_id] = self._convert(token)
        return found

    def _convert(self, token: str) -> bytes:
        try:
            return bytes(self._byte_of[character] for character in token)
        except KeyError:  # an added token with characters outside the alphabet stands for itself
            return token.encode("utf-8")


class ByteLevelDetokenizer:
    """Byte-level vocabularies: tokens are bytes, and UTF-8 tells when a character is complete."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        return self._utf8.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackRules:
    """How a SentencePiece-like vocabulary's tokens become text."""

    replacements: tuple[tuple[str, str], ...]
    """(pattern, text) replaced in every token, such as U+2581 by a space."""
    strip: str
    """Character removed from the beginning of the whole text."""
    strip_count: int
    """How many of them at most."""


class FallbackDetokenizer:
    """Vocabularies with tokens such as `<0xE2>` for bytes that no piece covers.

    A run of byte tokens is text only when the whole run is valid UTF-8 (one U+FFFD per byte
    otherwise), so a run is held until another token ends it.
    """

    def __init__(
        self,
        rules: FallbackRules,
        to_token: Callable[[int], str | None],
        skipped: Collection[int],
    ) -> None:
        self._rules = rules
        self._to_token = to_token
        self._skipped = skipped
        self._run = bytearray()
        self._strip_left = rules.strip_count

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        token = None if token_id in self._skipped else self._to_token(token_id)
        if token is None:
            return ""
        for pattern, text in self._rules.replacements:
            token = token.replace(pattern, text)
        if byte := _BYTE_TOKEN.fullmatch(token):
            self._run.append(int(byte[1], 16))
            return ""
        return self._stripped(self._end_run() + token)

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while text and self._strip_left:
            if text[0] != self._rules.strip:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text
