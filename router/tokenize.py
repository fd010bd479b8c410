"""Prompts to token ids, long ones away from the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from router.validation import Checked
from tandem.requests import Message, Prompt

_INLINE_BYTES = 4096
"""Shorter prompts are tokenized in the event loop: a millisecond at most."""
_THREADS = 2


class Encoder(Protocol):
    """The part of a tokenizer that the router needs."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def encode_chat(self, messages: tuple[Message, ...]) -> list[int]:
        """Token ids of a chat, ready for the assistant's turn."""


class PromptEncoder:
    """Tokenizes with a bounded number of threads; a cancelled prompt that waits is never begun."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    async def encode(self, checked: Checked) -> tuple[int, ...]:
        """Token ids of the request's prompt.

        Raises:
            RequestError: the tokenizer or the chat template refuses it.
        """
        if checked.prompt.token_ids:
            return checked.prompt.token_ids
        if checked.prompt_bytes <= _INLINE_BYTES:
            return self._encode(checked.prompt)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode, checked.prompt)

    def close(self) -> None:
        """Drop what waits; what runs ends on its own."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.text is not None:
            return tuple(self._encoder.encode(prompt.text))
        return tuple(self._encoder.encode_chat(prompt.messages))
