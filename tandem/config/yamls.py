"""YAML as settings need it: repeated keys are errors, and only ``true`` and ``false`` are booleans.

PyYAML follows YAML 1.1, where ``on`` and ``off`` are booleans and ``1e3`` is text. Here plain words
mean what YAML 1.2's core schema (chapter 10.3) says, so that ``decode.graph: off`` is the word off.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

_CORE_SCHEMA = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
)


class SettingsLoader(yaml.SafeLoader):
    """Loads plain data only."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping, refusing a key that stands in it twice."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} stands twice in one mapping", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Build an integer; a leading zero does not mean octal, ``0o`` does."""
        text = self.construct_scalar(node)
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


for _kind, _pattern, _first in _CORE_SCHEMA:
    SettingsLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}",
        re.compile(f"^(?:{_pattern})$"),
        [c.strip("\0") for c in _first],
    )
SettingsLoader.add_constructor("tag:yaml.org,2002:int", SettingsLoader.construct_yaml_int)


def parse(text: str) -> object:
    """Read one YAML document.

    Raises:
        yaml.YAMLError: the text is no YAML, names a key twice or asks for anything but plain data.
    """
    return yaml.load(text, Loader=SettingsLoader)


def render(data: object) -> str:
    """Write ``data`` so that ``parse`` reads the same, and so do readers of YAML 1.1."""
    return yaml.dump(data, Dumper=_SettingsDumper, sort_keys=False)


class _SettingsDumper(yaml.SafeDumper):
    """Puts quotes around text that either reader would take for something else."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [
            *SettingsLoader.yaml_implicit_resolvers.get(first, ()),
            *yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()),
        ]
        for first in {
            *SettingsLoader.yaml_implicit_resolvers,
            *yaml.SafeDumper.yaml_implicit_resolvers,
        }
    }
