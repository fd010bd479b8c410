"""Chat templates: jinja2 in a sandbox, with the functions that published templates count on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.errors import RequestError, TokenizerError
from tandem.requests import Message
from tandem.weights.checkpoint import read_json

_MAX_TEMPLATE_BYTES = 1 << 20
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """One compiled template; rendering is pure except for the date."""

    def __init__(
        self,
        source: str,
        file: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as problem:
            raise TokenizerError(file, f"chat template does not compile: {problem}") from problem

    def render(self, messages: Sequence[Message]) -> str:
        """The whole prompt, up to where the assistant's answer begins.

        Raises:
            RequestError: the template refuses these messages or fails on them.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(
                messages=turns,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except _RENDER_ERRORS as problem:
            raise RequestError("chat", f"the model's chat template says: {problem}") from problem


def load_chat_template(folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a model folder, or None when it has none.

    Looks for `chat_template.jinja`, then `chat_template.json`, then tokenizer_config.json, where
    it may be a string or a list of named ones of which `default` is taken.

    Args:
        folder: the model's folder.
        settings: tokenizer_config.json, parsed.

    Returns:
        The compiled template.

    Raises:
        TokenizerError: there is one and it cannot be used.
    """
    source: object
    path = folder / "chat_template.jinja"
    if path.is_file():
        source = _read_text(path)
    elif (path := folder / "chat_template.json").is_file():
        source = read_json(path).get("chat_template")
    else:
        path = folder / "tokenizer_config.json"
        source = settings.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry for entry in source if isinstance(entry, dict)}
        source = named.get("default", {}).get("template")
    if source is None:
        return None
    if not isinstance(source, str) or len(source) > _MAX_TEMPLATE_BYTES:
        raise TokenizerError(str(path), "chat_template is no text or larger than 1 MiB")
    return ChatTemplate(source, str(path), _special_tokens(settings))


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read(_MAX_TEMPLATE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as problem:
        raise TokenizerError(str(path), f"cannot be read: {problem}") from problem


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _TOKEN_NAMES:
        value = settings.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """jinja2's own filter escapes HTML characters; templates want plain JSON."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


class _GenerationTag(Extension):
    """`{% generation %}`, which marks text for training, is no more than its body here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
