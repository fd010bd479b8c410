"""Builds the configuration tree from YAML and ``a.b=value`` settings, and refuses what is wrong.

An error names the setting by its dotted path, what was found, and what would be right.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

import yaml

from tandem.config.ranges import Range
from tandem.config.rules import check_together
from tandem.config.tree import TandemConfig
from tandem.config.yamls import parse
from tandem.errors import ConfigError


def load(path: Path | None, sets: Sequence[str] = ()) -> TandemConfig:
    """Read a configuration.

    Args:
        path: a YAML file, or None for the defaults.
        sets: ``a.b=value`` each, the value in YAML; wins over the file and over earlier ones.

    Raises:
        ConfigError: the file or a setting is wrong.
    """
    settings = {} if path is None else _read(path)
    for assignment in sets:
        _assign(settings, assignment)
    return from_mapping(settings)


def from_mapping(settings: Mapping[str, object]) -> TandemConfig:
    """Build a tree from nested mappings as YAML and JSON give them; what is absent has its default.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, out of range, or contradicts another.
    """
    config = cast(TandemConfig, _build(TandemConfig, settings, ""))
    check_together(config)
    return config


def to_mapping(config: TandemConfig) -> dict[str, object]:
    """Turn a tree into nested plain data that ``from_mapping`` accepts."""
    return cast("dict[str, object]", _plain(config))


def dotted_names(node: type = TandemConfig, prefix: str = "") -> list[str]:
    """Names of all settings, in the tree's order."""
    names: list[str] = []
    for name, kind in get_type_hints(node).items():
        names += (
            dotted_names(cast(type, kind), f"{prefix}{name}.")
            if is_dataclass(kind)
            else [f"{prefix}{name}"]
        )
    return names


def _read(path: Path) -> dict[str, object]:
    try:
        settings = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), "is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(str(path), _yaml_problem(error)) from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(str(path), f"must hold settings by name, holds {_shown(settings)}")
    return settings


def _assign(settings: dict[str, object], assignment: str) -> None:
    name, equals, text = assignment.partition("=")
    if not equals or not all(name.split(".")):
        raise ConfigError(assignment, "must be written a.b=value, for example router.port=50052")
    try:
        value = parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(name, _yaml_problem(error)) from error
    *sections, last = name.split(".")
    for depth, section in enumerate(sections, start=1):
        if settings.get(section) is None:
            settings[section] = {}
        inner = settings[section]
        if not isinstance(inner, dict):
            section_name = ".".join(sections[:depth])
            raise ConfigError(section_name, f"{_shown(inner)} has no setting inside it")
        settings = inner
    settings[last] = value


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _build(kind: Any, value: object, name: str) -> object:
    if is_dataclass(kind):
        return _build_section(cast(type, kind), value, name)
    if get_origin(kind) is Annotated:
        plain, *rules = get_args(kind)
        built = _build(plain, value, name)
        for rule in rules:
            if isinstance(rule, Range) and cast(float, built) not in rule:
                raise ConfigError(name, f"must be {rule}, is {_shown(value)}")
        return built
    if get_origin(kind) is Literal:
        if value not in get_args(kind) or not isinstance(value, str):
            raise ConfigError(name, f"must be one of {_listed(get_args(kind))}; is {_shown(value)}")
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple) or not value:
            raise ConfigError(name, f"must be a list like [1, 2], is {_shown(value)}")
        return tuple(
            _build(get_args(kind)[0], item, f"{name}[{i}]") for i, item in enumerate(value)
        )
    return _build_scalar(kind, value, name)


def _build_section(kind: type, value: object, name: str) -> object:
    if value is None:  # a heading with nothing under it
        value = {}
    if not isinstance(value, Mapping):
        raise ConfigError(name, f"must hold settings by name, is {_shown(value)}")
    hints = get_type_hints(kind, include_extras=True)
    prefix = f"{name}." if name else ""
    for key in value:
        if key not in hints:
            raise ConfigError(f"{prefix}{key}", _unknown(str(key), list(hints), prefix))
    return kind(**{key: _build(hints[key], value[key], f"{prefix}{key}") for key in value})


def _unknown(key: str, known: list[str], prefix: str) -> str:
    where = f"in {prefix[:-1]}" if prefix else "here"
    problem = f"no such setting; known {where}: {', '.join(known)}"
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        return f"{problem}; did you mean {prefix}{close[0]}?"
    elsewhere = [name for name in dotted_names() if name.rpartition(".")[2] == key]
    return f"{problem}; did you mean {_listed(elsewhere)}?" if elsewhere else problem


def _build_scalar(kind: Any, value: object, name: str) -> object:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        expected = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        hint = "; put it in quotes" if kind is str and isinstance(value, int | float) else ""
        raise ConfigError(name, f"must be {expected[kind]}, is {_shown(value)}{hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(name, f"must be a finite number, is {value}")
    return value


def _plain(node: object) -> object:
    if is_dataclass(node) and not isinstance(node, type):
        return {field.name: _plain(getattr(node, field.name)) for field in fields(node)}
    return list(node) if isinstance(node, tuple) else node


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _shown(value: object) -> str:
    match value:
        case None:
            return "empty"
        case bool():
            return str(value).lower()
        case str():
            return f"the text {value!r}"
        case Mapping():
            return "a mapping"
        case list() | tuple():
            return f"the list {list(value)!r}"
        case _:
            return str(value)
