"""The characters that stand for bytes in byte-level vocabularies."""

from __future__ import annotations


def byte_alphabet() -> tuple[str, ...]:
    """The printable character that stands for each byte value.

    GPT-2's `bytes_to_unicode`: printable Latin-1 stands for itself, the rest counts up from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))
