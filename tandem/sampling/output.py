"""From tokens to what the caller sees: stop rules, text, and the reason for the end."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from tandem.requests import FinishReason, OutputChunk, SampledToken, StopParams


class TextStream(Protocol):
    """Turns tokens into text as it becomes final; `tandem.tokenizer.Detokenizer` is one."""

    def push(self, token_id: int) -> str:
        """Text that became final with this token."""
        ...

    def flush(self) -> str:
        """The rest, at the end."""
        ...


class OutputStream:
    """The output of one request. Every token goes through `push`, the handed-over one included.

    Text that may be the beginning of a stop string is held back until it is decided. Of several
    stop strings the one that is complete first ends the text, and of those that end together the
    longest: so the text does not depend on where one token ends and the next begins. A stop string
    counts only where it lies wholly after the text of the first ``min_tokens`` tokens.
    """

    def __init__(
        self,
        stop: StopParams,
        eos_token_ids: Collection[int],
        text: TextStream,
        max_context_tokens: int,
        prompt_tokens: int,
    ) -> None:
        """Start before the first token.

        Args:
            stop: the request's rules.
            eos_token_ids: the model's end-of-sequence tokens.
            text: a fresh stream.
            max_context_tokens: prompt and output together.
            prompt_tokens: length of the prompt; below ``max_context_tokens``.
        """
        self._stop = stop
        self._silent_token_ids = frozenset(stop.stop_token_ids)
        if not stop.ignore_eos:
            self._silent_token_ids |= frozenset(eos_token_ids)
        self._text = text
        self._max_tokens = min(stop.max_tokens, max_context_tokens - prompt_tokens)
        self._num_tokens = 0
        self._held = ""
        self.finished = False
        """The last chunk was returned; nothing may be pushed any more."""

    def push(self, token: SampledToken) -> OutputChunk:
        """Take one token; returns it with the text that became final."""
        assert not self.finished
        self._num_tokens += 1
        reason = self._take(token.token_id)
        text = self._release(reason)
        self.finished = reason is not None
        return OutputChunk(
            index=self._num_tokens - 1,
            token_ids=(token.token_id,),
            text=text,
            logprobs=() if token.logprobs is None else (token.logprobs,),
            finish_reason=reason,
        )

    def _take(self, token_id: int) -> FinishReason | None:
        """Add the token's text to what is held; why the output ends with it, if it does."""
        early = self._num_tokens <= self._stop.min_tokens
        ends_here = token_id in self._silent_token_ids and not early
        last = ends_here or self._num_tokens >= self._max_tokens
        if not ends_here:
            self._held += self._text.push(token_id)
        if last:
            self._held += self._text.flush()
        stopped = not early and self._cut_at_stop_string()
        if stopped or ends_here:
            return "stop"
        return "length" if last else None

    def _cut_at_stop_string(self) -> bool:
        """Cut what is held at the stop string that is complete first; whether there was one."""
        found = [
            (start + len(stop), start)
            for stop in self._stop.stop
            if (start := self._held.find(stop)) >= 0
        ]
        if found:
            _, start = min(found)
            self._held = self._held[:start]
        return bool(found)

    def _release(self, reason: FinishReason | None) -> str:
        """Text that nothing can take back any more."""
        keep = 0
        if reason is None and self._num_tokens > self._stop.min_tokens:
            keep = max((_overlap(self._held, stop) for stop in self._stop.stop), default=0)
        end = len(self._held) - keep
        text, self._held = self._held[:end], self._held[end:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, and not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
