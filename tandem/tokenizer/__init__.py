"""Tokenizers, chat templates and streaming detokenization."""
