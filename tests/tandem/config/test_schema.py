from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config.load import dotted_names, from_mapping, to_mapping
from tandem.config.schema import field_docs, json_schema, markdown
from tandem.config.tree import TandemConfig
from tandem.errors import ConfigError

VALIDATOR = jsonschema.Draft202012Validator(json_schema())

# Rules about two settings at once, which JSON Schema does not say.
TOGETHER = {
    "decode.buckets",
    "prefill.chunk_tokens",
    "cache.page_tokens",
    "prefill.page_tokens",
    "decode.page_tokens",
    "router.heartbeat_interval_s",
    "router.heartbeat_timeout_s",
    "transfer.tls.cert_file",
    "transfer.tls.key_file",
    "transfer.tls.ca_file",
    "limits.max_text_bytes",
    "limits.max_message_bytes",
}


def leaf(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = dict(VALIDATOR.schema)
    for part in name.split("."):
        schema = schema["properties"][part]
    return schema


def test_it_is_a_schema_and_the_defaults_satisfy_it() -> None:
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)
    VALIDATOR.validate(to_mapping(TandemConfig()))


@pytest.mark.parametrize("name", dotted_names())
def test_every_setting_is_described_with_its_default(name: str) -> None:
    default = attrgetter(name)(TandemConfig())
    assert leaf(name)["description"].endswith(".")
    assert leaf(name)["default"] == (list(default) if isinstance(default, tuple) else default)
    assert f"`{name}`" in markdown()


@pytest.mark.parametrize("name", dotted_names())
def test_every_number_has_a_range(name: str) -> None:
    schema = leaf(name).get("items", leaf(name))
    if schema["type"] in ("integer", "number"):
        assert {"minimum", "exclusiveMinimum"} & set(schema)


@dataclass
class Undocumented:
    """A section with a gap."""

    said: int = 1
    """This one is described."""
    unsaid: int = 2


def test_a_setting_without_a_docstring_is_an_error() -> None:
    with pytest.raises(KeyError, match="unsaid"):
        field_docs(Undocumented)


@given(
    st.sampled_from([name for name in dotted_names() if name not in TOGETHER]),
    st.none()
    | st.booleans()
    | st.integers(-2, 70_000)
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not x.is_integer())
    | st.sampled_from(["auto", "off", "cpu", "", "x"])
    | st.lists(st.integers(), max_size=2),
)
def test_schema_and_loader_agree(name: str, value: object) -> None:
    settings: Any = value
    for part in reversed(name.split(".")):
        settings = {part: settings}
    try:
        from_mapping(settings)
    except ConfigError:
        assert not VALIDATOR.is_valid(settings)
    else:
        assert VALIDATOR.is_valid(settings)


@pytest.mark.parametrize("settings", [{"unknown": 1}, {"router": {"prot": 1}}])
def test_unknown_names_are_invalid(settings: dict[str, object]) -> None:
    assert not VALIDATOR.is_valid(settings)


def test_no_description_breaks_the_table() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    assert len(rows) == len(dotted_names())
    assert all(row.count(" | ") == 3 for row in rows)
    assert math.inf not in [leaf(name).get("maximum") for name in dotted_names()]
