"""The cluster's secret, wrapped so that it does not end up in a log or a traceback."""

from __future__ import annotations

import secrets

_SECRET_BYTES = 32


class Secret:
    """Bytes that are shown as dots wherever the object itself is shown."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    @classmethod
    def draw(cls) -> Secret:
        """A new random secret."""
        return cls(secrets.token_bytes(_SECRET_BYTES))

    def reveal(self) -> bytes:
        """The bytes themselves."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(...)"
