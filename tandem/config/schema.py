"""The configuration tree described for machines (JSON Schema) and for people (Markdown)."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

from tandem.config.ranges import Range
from tandem.config.tree import TandemConfig

_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
_WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def json_schema() -> dict[str, object]:
    """JSON Schema (draft 2020-12) of the whole tree, with descriptions and defaults."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Tandem configuration",
        **_section_schema(TandemConfig),
    }


def markdown() -> str:
    """All settings as one table for each section."""
    return "\n".join([_HEAD, *_tables(TandemConfig, "")])


def _tables(section: type, prefix: str) -> Iterator[str]:
    title = f"`{prefix[:-1]}`" if prefix else "The root"
    yield _section_table(section, title, prefix)
    for name, kind in get_type_hints(section).items():
        if is_dataclass(kind):
            yield from _tables(cast(type, kind), f"{prefix}{name}.")


def field_docs(section: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, line breaks folded.

    Raises:
        KeyError: a field has none.
    """
    tree = ast.parse(inspect.cleandoc(inspect.getsource(section)))
    body = cast(ast.ClassDef, tree.body[0]).body
    docs: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(doc))
            ):
                docs[name] = " ".join(doc.split())
    return {field.name: docs[field.name] for field in fields(section)}


def _section_schema(section: type) -> dict[str, object]:
    hints = get_type_hints(section, include_extras=True)
    docs = field_docs(section)
    properties: dict[str, object] = {}
    for field in fields(section):
        described: dict[str, object] = {"description": docs[field.name]}
        if is_dataclass(hints[field.name]):
            described |= _section_schema(hints[field.name])
            described["description"] = docs[field.name]
        else:
            described |= {**_value_schema(hints[field.name]), "default": _default(field)}
        properties[field.name] = described
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _value_schema(kind: Any) -> dict[str, object]:
    if get_origin(kind) is Annotated:
        plain, *rules = get_args(kind)
        schema = _value_schema(plain)
        for rule in rules:
            if isinstance(rule, Range):
                schema["exclusiveMinimum" if rule.above else "minimum"] = rule.minimum
                if rule.maximum != math.inf:
                    schema["maximum"] = rule.maximum
        return schema
    if get_origin(kind) is Literal:
        return {"type": "string", "enum": list(get_args(kind))}
    if get_origin(kind) is tuple:
        items = _value_schema(get_args(kind)[0])
        return {"type": "array", "items": items, "minItems": 1, "uniqueItems": True}
    return {"type": _JSON_TYPES[kind]}


def _default(field: Field[Any]) -> object:
    assert field.default is not MISSING, f"setting {field.name} has no default"
    return list(field.default) if isinstance(field.default, tuple) else field.default


_HEAD = """# Configuration

`tandem serve --config FILE` reads YAML; `--set a.b=value` wins over it. `tandem config show`
prints the tree in effect. Unknown names, wrong types and numbers out of range are refused with the
setting's name. This page is generated from `tandem/config/tree.py` (`make schema`);
[config.schema.json](config.schema.json) says the same to editors.

```yaml
model: {name: smollm2}
router: {port: 50051}
decode: {replicas: 2, buckets: [1, 2, 4, 8, 16]}
```
"""


def _section_table(section: type, title: str, prefix: str) -> str:
    hints = get_type_hints(section, include_extras=True)
    docs = field_docs(section)
    rows = [
        f"| `{prefix}{field.name}` | {_words(hints[field.name])} | {_shown_default(field)} "
        f"| {docs[field.name]} |"
        for field in fields(section)
        if not is_dataclass(hints[field.name])
    ]
    doc = inspect.getdoc(section)
    table = "\n".join(
        ["| setting | values | default | meaning |", "| --- | --- | --- | --- |", *rows]
    )
    return f"## {title}\n\n{doc}\n\n{table}\n"


def _words(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        plain, *rules = get_args(kind)
        return ", ".join([_words(plain), *map(str, rules)])
    if get_origin(kind) is Literal:
        return " / ".join(f"`{word}`" for word in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of: {_words(get_args(kind)[0])}"
    return _WORDS[kind]


def _shown_default(field: Field[Any]) -> str:
    default = _default(field)
    return f"`{str(default).lower()}`" if default != "" else "empty"
