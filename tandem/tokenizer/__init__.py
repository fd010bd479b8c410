"""Text to token ids and back."""

from __future__ import annotations

from tandem.tokenizer.detokenizer import Detokenizer
from tandem.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer"]
