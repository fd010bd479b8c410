"""Chat templates: what published ones count on, where they are found, what the sandbox stops."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import RequestError, TokenizerError
from tandem.requests import Message
from tandem.tokenizer.chat import ChatTemplate, load_chat_template

TURNS = (Message(role="user", content="hi"), Message(role="assistant", content="<&'\u00e9>"))


def render(source: str, messages: tuple[Message, ...] = TURNS, **tokens: str) -> str:
    now = datetime(2024, 2, 29, tzinfo=UTC)
    return ChatTemplate(source, "file", tokens, lambda: now).render(messages)


def test_variables() -> None:
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}:{{ m['content'] }}]{% endfor %}"
    source += "{{ add_generation_prompt }}{{ tools is none }}{{ documents is none }}"
    assert render(source, bos_token="<s>") == "<s>[user:hi][assistant:<&'\u00e9>]TrueTrueTrue"


def test_blocks_are_trimmed_as_transformers_does() -> None:
    source = "  {% if true %}\nx\n  {% endif %}\ny"
    assert render(source) == "x\ny"


def test_json_is_plain() -> None:
    assert render("{{ messages[1].content | tojson }}") == '"<&\'\u00e9>"'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": 2\n}'


def test_date_loop_controls_and_generation_blocks() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "29 Feb 2024"
    source = "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}x{% endfor %}"
    assert render(source) == "x"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"


def test_template_that_refuses() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "chat"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].role }}",
        "{{ messages + 1 }}",
        "{{ 1 / 0 }}",
        "{{ none.x.y }}",
        "{{ undefined_function() }}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__()[0] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '%d' | format('x') }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'other' %}",
    ],
)
def test_failures_are_the_requests_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        render(source)


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% nonsense %}", "{{ 'a' | nosuch }}"])
def test_templates_that_do_not_compile(source: str) -> None:
    with pytest.raises(TokenizerError, match="compile") as caught:
        render(source)
    assert caught.value.file == "file"


def load(folder: Path, settings: dict[str, Any]) -> str | None:
    template = load_chat_template(folder, settings)
    return None if template is None else template.render(TURNS)


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert load(tmp_path, {}) is None
    settings: dict[str, Any] = {"chat_template": "config"}
    assert load(tmp_path, settings) == "config"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load(tmp_path, settings) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert load(tmp_path, settings) == "jinja"


def test_named_templates() -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert load(Path("nowhere"), {"chat_template": named}) == "d"
    assert load(Path("nowhere"), {"chat_template": named[:1]}) is None


def test_tokens_may_be_objects() -> None:
    settings = {
        "chat_template": "{{ bos_token }}",
        "bos_token": {"content": "<s>", "lstrip": False},
    }
    assert load(Path("nowhere"), settings) == "<s>"


@pytest.mark.parametrize("source", [3, "x" * (1 << 21)])
def test_templates_of_another_type_or_size(source: Any) -> None:
    with pytest.raises(TokenizerError, match="chat_template"):
        load(Path("nowhere"), {"chat_template": source})


def test_template_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match="cannot be read"):
        load(tmp_path, {})
