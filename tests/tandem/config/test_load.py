from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config.load import dotted_names, from_mapping, load, to_mapping
from tandem.config.ranges import Range
from tandem.config.tree import TandemConfig
from tandem.config.yamls import parse, render
from tandem.errors import ConfigError


def refusal(*sets: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(None, sets)
    return caught.value


def attempt(settings: dict[str, object]) -> TandemConfig | ConfigError:
    try:
        return from_mapping(settings)
    except ConfigError as error:
        return error


def test_nothing_set_gives_the_defaults() -> None:
    assert load(None) == TandemConfig()


def test_sets_win_over_the_file_and_later_over_earlier(tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("router: {port: 1, host: 0.0.0.0}\ndecode:\n  buckets: [1, 3]\n")
    config = load(file, ["router.port=2", "router.port=3", "prefill.replicas=2"])
    assert (config.router.port, config.router.host) == (3, "0.0.0.0")
    assert config.decode.buckets == (1, 3)
    assert config.prefill.replicas == 2
    assert config.cache == TandemConfig().cache


@pytest.mark.parametrize("text", ["", "router:\n", "# nothing\n", "---\n"])
def test_an_empty_file_or_heading_gives_the_defaults(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text(text)
    assert load(file, ["router.port=9"]).router.port == 9


def test_off_is_the_word_and_a_whole_number_serves_as_number() -> None:
    config = load(None, ["decode.graph=off", "transfer.lease_s=1e2", "transfer.idle_timeout_s=3"])
    assert config.decode.graph == "off"
    assert config.transfer.lease_s == 100.0
    assert isinstance(config.transfer.idle_timeout_s, float)


def test_an_unknown_setting_names_the_known_ones_and_a_close_match() -> None:
    error = refusal("router.prot=1")
    assert error.field == "router.prot"
    assert "heartbeat_timeout_s" in error.problem
    assert "did you mean router.port?" in error.problem


def test_a_setting_without_its_section_is_found() -> None:
    assert "did you mean router.port?" in refusal("port=1").problem
    assert "prefill.replicas, decode.replicas" in refusal("replicas=1").problem


@pytest.mark.parametrize(
    ("assignment", "field", "expected"),
    [
        ("router.port=http", "router.port", "whole number"),
        ("router.port=1.5", "router.port", "whole number"),
        ("router.port=true", "router.port", "whole number"),
        ("router.port=", "router.port", "is empty"),
        ("router.port=70000", "router.port", "at most 65535"),
        ("router.port=-1", "router.port", "at least 0"),
        ("prefill.replicas=0", "prefill.replicas", "at least 1"),
        ("transfer.lease_s=0", "transfer.lease_s", "above 0"),
        ("transfer.lease_s=.nan", "transfer.lease_s", "finite"),
        ("transfer.lease_s=.inf", "transfer.lease_s", "finite"),
        ("cache.prefix_reuse=1", "cache.prefix_reuse", "true or false"),
        ("model.name=7", "model.name", "put it in quotes"),
        ("mode=both", "mode", "disaggregated, colocated"),
        ("decode.graph=true", "decode.graph", "auto, on, off"),
        ("decode.buckets=4", "decode.buckets", "a list"),
        ("decode.buckets=[]", "decode.buckets", "a list"),
        ("decode.buckets=[1, x]", "decode.buckets[1]", "whole number"),
        ("decode.buckets=[0, 1]", "decode.buckets[0]", "at least 1"),
        ("decode.buckets=[2, 1]", "decode.buckets", "ascend"),
        ("decode.buckets=[1, 1]", "decode.buckets", "ascend"),
        ("prefill.chunk_tokens=24", "prefill.chunk_tokens", "cache.page_tokens (16)"),
        ("decode.page_tokens=24", "decode.page_tokens", "neither is a multiple"),
        ("prefill.page_tokens=512", "prefill.chunk_tokens", "prefill.page_tokens (512)"),
        ("router.heartbeat_interval_s=9", "router.heartbeat_timeout_s", "heartbeat_interval_s (9)"),
        ("transfer.tls.ca_file=ca.pem", "transfer.tls.cert_file", "all three or none"),
        ("limits.max_text_bytes=16777216", "limits.max_text_bytes", "below limits.max_message"),
        ("ray.object_store_bytes=1000", "ray.object_store_bytes", "at least"),
        ("router=5", "router", "settings by name"),
        ("router.port.x=5", "router.port", "whole number"),
        ("nothing", "nothing", "a.b=value"),
        (".port=1", ".port=1", "a.b=value"),
        ("router.port=[", "router.port", "line 1"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(assignment: str, field: str, expected: str) -> None:
    error = refusal(assignment)
    assert error.field == field
    assert expected in error.problem


def test_a_setting_inside_a_value_is_refused() -> None:
    assert refusal("router.port=5", "router.port.low=1").field == "router.port"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("router: {port: 1}\nrouter: {port: 2}\n", "'router' stands twice"),
        ("router:\n  port: 1\n  port: 2\n", "'port' stands twice"),
        ("- 1\n", "settings by name"),
        ("router: [\n", "line 2"),
        ("model: {name: !!python/object/apply:os.getcwd []}\n", "could not determine"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        load(file)
    assert caught.value.field == str(file)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "absent.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(tmp_path / "binary")


def test_the_shown_tree_loads_again() -> None:
    config = load(None, ["decode.graph=off", "model.name='007'", "decode.buckets=[3, 5]"])
    assert from_mapping(to_mapping(config)) == config
    shown = parse(render(to_mapping(config)))
    assert isinstance(shown, dict)
    assert from_mapping(shown) == config


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.floats(), st.lists))
def test_rendered_yaml_reads_back(value: object) -> None:
    assert repr(parse(render({"value": value}))) == repr({"value": value})


@given(
    st.sampled_from(dotted_names()),
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(), max_size=3),
)
def test_any_value_gives_a_tree_or_an_error_with_the_settings_name(
    name: str, value: object
) -> None:
    settings: Any = value
    for part in reversed(name.split(".")):
        settings = {part: settings}
    built = attempt(settings)
    if isinstance(built, ConfigError):
        assert built.problem
        assert built.field.split("[")[0] in dotted_names()
    else:
        assert from_mapping(to_mapping(built)) == built


@given(st.floats(allow_nan=False))
def test_ranges_hold_their_ends(number: float) -> None:
    assert (number in Range(minimum=0)) == (number >= 0)
    assert (number in Range(minimum=0, above=True)) == (number > 0)
    assert (number in Range(minimum=0, maximum=5)) == (0 <= number <= 5)
    assert math.nan not in Range(minimum=0)
